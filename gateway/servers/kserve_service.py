"""inference.GRPCInferenceService: what clients of KServe and Triton call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from gateway.admission.caller import identify
from gateway.api.errors import YardError, invalid
from gateway.api.proto import kserve_pb2 as pb
from gateway.api.proto.kserve_pb2_grpc import GRPCInferenceServiceServicer
from gateway.routing import route_table
from gateway.servers import kserve_model
from gateway.servers.generation_group import GenerationGroup
from gateway.servers.generation_path import GenerationPath
from gateway.servers.grpc_call import GrpcCall, deadline, headers
from gateway.servers.grpc_errors import abort
from gateway.servers.health_service import HealthService
from gateway.servers.kserve_repository import KserveRepository
from gateway.servers.kserve_request import VERSION, check_version, infer_request
from gateway.servers.kserve_stream import SURFACE, KserveStream, whole
from gateway.servers.metrics import GatewayMetrics
from gateway.servers.tally import Tally
from gateway.state.view import RouteEntry

SERVER = "modelyard"
EXTENSIONS = ("model_repository", "model_configuration", "statistics", "schedule_policy")

Context = grpc.aio.ServicerContext


class KserveService(GRPCInferenceServiceServicer):
    """A model of this protocol is a route, an alias or a model of ours."""

    def __init__(
        self, path: GenerationPath, metrics: GatewayMetrics, health: HealthService, repository: KserveRepository, version: str
    ) -> None:
        self._path = path
        self._metrics = metrics
        self._health = health
        self._repository = repository
        self._version = version

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._health.accepting)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name=SERVER, version=self._version, extensions=EXTENSIONS)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """Whether it can be asked, as in health: what is parked can, and is woken by it."""
        return pb.ModelReadyResponse(ready=request.version in ("", VERSION) and self._health.serves(request.name))

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        await self._known(request, context)
        return kserve_model.metadata(request.name)

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        models = await self._known(request, context)
        contexts = [length for model in models if (length := self._path.known_context(model))]
        return kserve_model.config(request.name, max_context=min(contexts, default=0), models=models)

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Of the models behind the name, counted by this gateway. Without a name: of all."""
        models = await self._known(request, context) if request.name else sorted(self._path.view.models)
        tallies = self._metrics.tallies
        return pb.ModelStatisticsResponse(
            model_stats=[kserve_model.statistics(model, tallies.get(model) or Tally()) for model in models]
        )

    async def _known(
        self, request: pb.ModelMetadataRequest | pb.ModelConfigRequest | pb.ModelStatisticsRequest, context: Context
    ) -> list[str]:
        """The models behind the name. Ends the call when there are none, or nobody may ask."""
        try:
            identify(self._path.view, headers(context)).check_name(self._path.view, request.name)
            check_version(request.name, request.version)
            return self._models(request.name)
        except YardError as error:
            await abort(context, error)

    def _models(self, name: str) -> list[str]:
        route: RouteEntry | None = self._path.view.resolve(name)
        if route is None:
            raise route_table.unknown(self._path.view, name)
        return [model for model, weight in route.targets if weight > 0 and model in self._path.view.models]

    # ---------------------------------------------------------------- inference

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        try:
            asked = infer_request(
                request, now=asyncio.get_running_loop().time(), deadline=deadline(context), headers=headers(context)
            )
            if asked.stream:
                raise invalid("ModelInfer has one response; call ModelStreamInfer for a stream, or leave `stream` out", "stream")
        except YardError as error:
            self._metrics.requests.labels(SURFACE, self._metrics.route_label(request.model_name), error.code.value).inc()
            await abort(context, error)
        call = GrpcCall(self._path, self._metrics, SURFACE, GenerationGroup(self._path, asked.generations), context)
        try:
            news = await call.start()
            deltas = await whole(call.generation, call.meter, news)
            return asked.response(deltas, model=call.first.model)
        except YardError as error:
            await call.abort(error)
        finally:
            call.end()

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        await KserveStream(self._path, self._metrics, context).serve(request_iterator)

    # ---------------------------------------------------------------- repository

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        try:
            caller = identify(self._path.view, headers(context))
        except YardError as error:
            await abort(context, error)
        index = self._repository.index(ready=request.ready)
        return pb.RepositoryIndexResponse(models=[entry for entry in index.models if caller.may_ask(entry.name, entry.name)])

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        try:
            await self._repository.load(request, context)
        except YardError as error:
            await abort(context, error)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        try:
            await self._repository.unload(request, context)
        except YardError as error:
            await abort(context, error)
        return pb.RepositoryModelUnloadResponse()
