"""The cost model against what was measured, and what placement makes of SLOs and expected loads."""

from __future__ import annotations

from functools import cache

import pytest
from meta_models import meta_model, shape_of
from sites import node

from placement.hardware import hardware_of
from placement.packing import place
from placement.speed import group_speed, slo_problem
from placement.types import Load, MeasuredSpeed, ModelRequest, ModelShape, Plan, Slo, Snapshot

H200, L4 = "NVIDIA H200", "NVIDIA L4"


@cache
def shape(family: str) -> ModelShape:
    """By transformers' defaults, which are those of Llama-2-7B and Mixtral-8x7B."""
    return shape_of(meta_model(model_type=family))


def llama_7b(name: str = "m", **request: object) -> ModelRequest:
    return ModelRequest(name, shape("llama"), **{"context": 1024, **request})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "context", "measured_s"),
    [
        (1, 160, 1 / 223),  # results/engine-nvidia-h200-2026-11-30.json: one stream, 32 tokens in, 256 out
        (128, 640, 16.61e-3),  # paged decode with FlashInfer in one graph, steps of 128 at context 640
    ],
)
def test_the_model_is_near_what_an_h200_was_measured_at(batch: int, context: int, measured_s: float) -> None:
    speed = group_speed(llama_7b(), 1, 1, "cuda", H200, context)
    assert speed.token_s(batch) == pytest.approx(measured_s, rel=0.25)


def test_the_widest_name_of_a_card_counts() -> None:
    assert hardware_of("cuda", "NVIDIA H100 PCIe").name == "H100 PCIe"
    assert hardware_of("cuda", "NVIDIA H100 80GB HBM3").name == "H100"
    assert hardware_of("cuda", "NVIDIA L40S").name == "L40S"
    assert hardware_of("cuda", "a card of next year").name == "L4"


def test_what_was_measured_replaces_the_estimate() -> None:
    seen = MeasuredSpeed(2, 1, "cuda", H200, 1e-3, 2e-3, 3e-3)
    request = llama_7b(measured_speed=(seen,))
    assert group_speed(request, 2, 1, "cuda", H200).token_s(10) == pytest.approx(21e-3)
    assert group_speed(request, 1, 1, "cuda", H200).token_s(10) != pytest.approx(21e-3)


def test_more_shards_are_faster_but_their_messages_stay() -> None:
    steps = {degree: group_speed(llama_7b(), degree, 1, "cuda", H200).token_s(1) for degree in (1, 2, 4, 32)}
    assert steps[1] > steps[2] > steps[4]
    assert steps[32] > steps[4] / 2


def test_experts_cost_the_compute_of_few_and_the_memory_of_many() -> None:
    request = ModelRequest("m", shape("mixtral"), concurrency=1)
    # 46.7 billion parameters, of which a token goes through 12.9: two of eight experts, and what is no expert.
    one = group_speed(request, 8, 1, "cuda", H200).base_s
    many = group_speed(ModelRequest("m", shape("mixtral"), concurrency=64), 8, 1, "cuda", H200).base_s
    assert 1.3 < many / one < 4


def _on(plan: Plan) -> dict[str, set[tuple[str, int]]]:
    where: dict[str, set[tuple[str, int]]] = {}
    for group in plan.groups:
        where.setdefault(group.model, set()).update((group.pool, rank) for rank in group.ranks)
    return where


def test_degrees_are_the_smallest_that_meet_the_slo() -> None:
    devices = node("p", "n", 8, 140, type=H200)
    tokens_s = [group_speed(llama_7b(concurrency=1), degree, 1, "cuda", H200).token_s(1) for degree in (1, 2)]
    assert tokens_s[1] < tokens_s[0]
    slo = Slo(token_s=(tokens_s[0] + tokens_s[1]) / 2)
    for slo_of, degree in ((None, 1), (slo, 2)):
        (group,) = place(Snapshot(devices, (llama_7b(concurrency=1, slo=slo_of),))).groups
        assert (group.tensor_parallel, group.pipeline_parallel) == (degree, 1)


def test_a_model_goes_to_the_cards_that_are_fast_enough() -> None:
    """The slow ones have more memory free, and would be chosen without the SLO."""
    devices = node("p", "slow", 2, 200, type=L4) + node("p", "fast", 1, 40, first_rank=2, type=H200)
    assert _on(place(Snapshot(devices, (llama_7b(),))))["m"] == {("p", 0)}
    request = llama_7b(concurrency=1, tensor_parallel=1, slo=Slo(token_s=0.01))
    assert _on(place(Snapshot(devices, (request,))))["m"] == {("p", 2)}


def test_a_refusal_for_speed_says_by_how_much_and_what_would_do() -> None:
    devices = node("p", "n", 1, 200, type=L4)
    request = llama_7b(concurrency=1, slo=Slo(token_s=0.05))
    plan = place(Snapshot(devices, (request,)))
    texts = [reason.message for reason in plan.refusals["m"]]
    assert "too slow for it (1 × 1 on L4: 6" in texts[0]
    assert "its slo is 50.0 ms" in texts[0]
    assert "precision int8 would fit" in texts
    assert slo_problem(llama_7b(concurrency=1, slo=Slo(token_s=0.05), precision="int8"), 1, 1, "cuda", L4) == ""


def test_a_long_prompt_may_not_take_longer_than_promised() -> None:
    request = llama_7b(slo=Slo(first_token_s=0.05, prompt_tokens=1000))
    assert "to the first token of a prompt of 1000 tokens" in slo_problem(request, 1, 1, "cuda", L4)
    assert slo_problem(request, 1, 1, "cuda", H200) == ""


def _busy(name: str, mean: float, peak: float, **request: object) -> ModelRequest:
    """Shares of what one H200 computes of it."""
    most = group_speed(llama_7b(), 1, 1, "cuda", H200).tokens_per_s(16)
    return llama_7b(name, load=Load(mean * most, peak * most), **request)


def test_hot_models_are_kept_apart_though_memory_would_put_them_together() -> None:
    devices = node("p", "n", 1, 140, type=H200) + node("p", "o", 1, 60, first_rank=1, type=H200)
    two = (_busy("a", 0.4, 0.7), _busy("b", 0.4, 0.7))
    assert _on(place(Snapshot(devices, two))) == {"a": {("p", 0)}, "b": {("p", 1)}}
    # Without loads both go where most is free.
    assert _on(place(Snapshot(devices, (llama_7b("a"), llama_7b("b"))))) == {"a": {("p", 0)}, "b": {("p", 0)}}
    # Peaks seldom meet: means of 0.3 and one rise of 0.3 are 0.9 of a device.
    mild = (_busy("a", 0.3, 0.6), _busy("b", 0.3, 0.6))
    assert _on(place(Snapshot(devices, mild))) == {"a": {("p", 0)}, "b": {("p", 0)}}


def test_a_crowded_device_is_better_than_none_and_too_few_replicas_are_said() -> None:
    devices = node("p", "n", 1, 140, type=H200)
    plan = place(Snapshot(devices, (_busy("a", 0.8, 0.9), _busy("b", 0.8, 1.8))))
    assert set(_on(plan)) == {"a", "b"}
    assert not plan.refusals
    assert list(plan.notes) == ["b"]
    assert "ask for replicas: 2" in plan.notes["b"][0].message


def test_a_plan_with_loads_is_the_same_in_any_order() -> None:
    devices = node("p", "n", 4, 80, type=H200)
    models = tuple(_busy(f"m{index}", 0.1 * index, 0.2 * index) for index in range(1, 6))
    assert place(Snapshot(devices, models)) == place(Snapshot(devices[::-1], models[::-1]))
