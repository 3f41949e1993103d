"""Pages about a server: `/openapi.json`, `/docs` and `/`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import msgspec
from aiohttp import web

from baton import __version__
from baton.openai.backend import ServedModel
from baton.openai.messages.requests import CountTokensRequest, MessagesRequest
from baton.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from baton.openai.responses.requests import ResponsesRequest

_BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_REFERENCE = "#/components/schemas/{name}"
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code,pre{font:14px/1.5 ui-monospace,monospace}pre{background:#8882;padding:1rem;overflow:auto}"
    "td,th{text-align:left;vertical-align:top;padding:.2rem 1rem .2rem 0}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route of an app. `summary`: the first line of its handler's docstring."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None


def endpoints(app: web.Application) -> Iterator[Endpoint]:
    for route in app.router.routes():
        path = re.sub(r"{(\w+):[^{}]*}", r"{\1}", route.resource.canonical if route.resource is not None else "")
        if route.method not in ("HEAD", "*"):
            summary = (inspect.getdoc(route.handler) or "").partition("\n")[0]
            yield Endpoint(route.method, path, summary, _BODIES.get(path) if route.method == "POST" else None)


def openapi(app: web.Application) -> dict[str, Any]:
    bodies = list(_BODIES.values())
    schemas, components = msgspec.json.schema_components(bodies, ref_template=_REFERENCE)
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints(app):
        operation: dict[str, Any] = {"summary": one.summary, "responses": {"200": {"description": "The answer."}}}
        if names := re.findall(r"{(\w+)}", one.path):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if one.body is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema_of[one.body]}},
            }
        paths.setdefault(one.path, {})[one.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def docs_page(app: web.Application) -> web.Response:
    parts = ["<h1>Baton's API</h1><p>As <a href=openapi.json>openapi.json</a>.</p>"]
    for one in endpoints(app):
        parts.append(f"<h2><code>{one.method} {escape(one.path)}</code></h2><p>{escape(one.summary)}</p>")
        if one.body is not None:
            rows = "".join(
                f"<tr><td><code>{escape(field.encode_name)}</code><td>{'required' if field.required else ''}"
                for field in msgspec.structs.fields(one.body)
            )
            parts.append(f"<table>{rows}</table>")
    return _page("Baton's API", "".join(parts))


def home_page(model: ServedModel | None, url: str) -> web.Response:
    """`model` None: none yet, or the client may not see it."""
    about = "<p>This is a server of language models. Which model it serves is told at <code>/v1/models</code>.</p>"
    name = "NAME"
    if model is not None:
        name = model.name
        about = f"<p>It serves <code>{escape(name)}</code>, whose context holds {model.max_model_len} tokens"
        drafts = model.num_speculative_tokens
        about += f", with up to {drafts} drafts a step.</p>" if drafts else ".</p>"
    body = msgspec.json.encode({"model": name, "messages": [{"role": "user", "content": "Hello"}]}).decode()
    # Quoted for a shell.
    quoted = body.replace("'", "'\\''")
    asks = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{quoted}'"
    links = "".join(f"<li><a href={path}>/{path}</a>" for path in ("docs", "v1/models", "health", "metrics"))
    return _page("Baton", f"<h1>Baton {__version__}</h1>{about}<pre>{escape(asks)}</pre><ul>{links}</ul>")


def _page(title: str, body: str) -> web.Response:
    text = f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>{body}"
    return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": _POLICY})
