from starlette.applications import Starlette


def openai_app(path, metrics, health) -> Starlette:
    return Starlette()
