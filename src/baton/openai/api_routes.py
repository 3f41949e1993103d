"""The routes of the OpenAI API and vLLM's additions, for an engine's server and the router."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from baton import __version__
from baton.errors import BatonError, RequestError
from baton.openai.backend import ServedModel
from baton.openai.http.app import BODIES, DRAIN, KEYS, MESSAGES, Handler, json_response, send_answer
from baton.openai.messages import count_tokens, error_event, make_message_plan
from baton.openai.messages import respond as respond_message
from baton.openai.pages import docs_page, home_page, openapi
from baton.openai.plan import make_chat_plan, make_completion_plan
from baton.openai.responses import make_response_plan, respond
from baton.openai.service import OpenAIService
from baton.openai.tools import Parsing

T = TypeVar("T")

# vLLM's endpoints for models that do not generate text.
_NOT_GENERATED = {
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/pooling": "embeddings",
    "/classify": "classes",
    "/score": "scores",
    "/v1/score": "scores",
    "/rerank": "scores",
    "/v1/rerank": "scores",
    "/v2/rerank": "scores",
}


def add_openai_routes(app: web.Application, service: OpenAIService) -> None:
    """OpenAI's models, completions, chats and responses, Anthropic's messages, and vLLM's endpoints."""
    _add_model(app, service)
    _add_generation(app, service)
    _add_refusals(app)
    _add_pages(app, service)


def _add_model(app: web.Application, service: OpenAIService) -> None:
    async def models(request: web.Request) -> web.StreamResponse:
        """The served model."""
        return json_response(service.models())

    async def model(request: web.Request) -> web.StreamResponse:
        """The served model, by name."""
        return json_response(service.model_card(request.match_info["name"]))

    async def tokenize(request: web.Request) -> web.StreamResponse:
        """The tokens of a text or a chat."""
        async with app[BODIES].read(request) as body:
            return json_response(await service.tokenize(body))

    async def detokenize(request: web.Request) -> web.StreamResponse:
        """The text of tokens."""
        async with app[BODIES].read(request) as body:
            return json_response(await service.detokenize(body))

    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)  # names of Hugging Face models have slashes
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)


def _add_generation(app: web.Application, service: OpenAIService) -> None:
    async def completions(request: web.Request) -> web.StreamResponse:
        """OpenAI's completions, whole or streamed."""
        return await send_answer(request, await service.answer(await plan(request, make_completion_plan)))

    async def chat(request: web.Request) -> web.StreamResponse:
        """OpenAI's chat completions, whole or streamed."""
        return await send_answer(request, await service.answer(await plan(request, make_chat_plan)))

    async def responses(request: web.Request) -> web.StreamResponse:
        """OpenAI's responses, whole or streamed. They are not stored."""
        return await send_answer(request, await respond(service, await plan(request, make_response_plan)))

    async def messages(request: web.Request) -> web.StreamResponse:
        """Anthropic's messages, whole or streamed."""
        answer = await respond_message(service, await plan(request, make_message_plan))
        return await send_answer(request, answer, error_event)

    async def count(request: web.Request) -> web.StreamResponse:
        """The number of tokens in a message's prompt."""
        async with app[BODIES].read(request) as body:
            return json_response(await service.understand(count_tokens, body))

    async def plan(request: web.Request, make: Callable[[bytes, ServedModel, Parsing], T]) -> T:
        async with app[BODIES].read(request) as body:
            return await service.plan(body, make)

    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/responses", responses)
    app.router.add_post(MESSAGES, messages)
    app.router.add_post(f"{MESSAGES}/count_tokens", count)


def _add_refusals(app: web.Application) -> None:
    """Endpoints that clients may expect; the error names the alternative."""

    async def no_response(request: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound(reason="responses are not kept here: there is none to get, cancel or delete")

    async def not_generated(request: web.Request) -> web.StreamResponse:
        what = _NOT_GENERATED[request.path]
        raise RequestError(
            f"{request.path} is not served here: this model generates text, not {what}; use a server with a "
            f"model for {what}, such as vLLM"
        )

    app.router.add_route("*", "/v1/responses/{id:.+}", no_response)
    for path in _NOT_GENERATED:
        app.router.add_route("*", path, not_generated)


def add_health(app: web.Application, health: Handler) -> None:
    """Both paths give the same answer; `/ping` is SageMaker's."""
    app.router.add_get("/health", health)
    app.router.add_get("/ping", health)
    app.router.add_post("/ping", health)


def _add_pages(app: web.Application, service: OpenAIService) -> None:
    async def version(request: web.Request) -> web.StreamResponse:
        """Baton's version."""
        return json_response({"version": __version__})

    async def load(request: web.Request) -> web.StreamResponse:
        """The number of other running requests."""
        return json_response({"server_load": len(app[DRAIN].tasks) - 1})

    async def description(request: web.Request) -> web.StreamResponse:
        """This API as OpenAPI 3.1."""
        return json_response(openapi(app))

    async def docs(request: web.Request) -> web.StreamResponse:
        """This API as a page."""
        return docs_page(app)

    async def home(request: web.Request) -> web.StreamResponse:
        """A page about this server."""
        try:
            known = service.served_model() if app[KEYS].allow(request) else None
        except BatonError:  # there is no model yet, or only a router may use it
            known = None
        return home_page(known, f"{request.scheme}://{request.host}")

    app.router.add_get("/version", version)
    app.router.add_get("/load", load)
    app.router.add_get("/openapi.json", description)
    app.router.add_get("/docs", docs)
    app.router.add_get("/", home)
