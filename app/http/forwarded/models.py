"""ASGI endpoints that list models, and load and unload LoRA adapters."""

import json
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from actors.errors import BusyError, DeadlineError, EngineError, OverloadedError, UnavailableError, with_causes
from actors.request import Call
from actors.router.adapters import AdapterError, AdapterNameError
from actors.router.model_router import ModelRouter, ask_decode
from actors.router.router import Router
from app.http.errors import BadRequestError, error_response, status_of
from app.http.parsing import forwarded_headers, parse_body, read_body
from connectors.errors import TandemError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 16
"""Largest body in bytes of a request that loads or unloads an adapter."""

MAX_NAME_CHARACTERS = 256
MAX_PATH_CHARACTERS = 4096
"""Limits of an adapter's name and path; the latter is Linux's."""


class ModelList:
    """Endpoint `/v1/models` of several models: joins the lists of those with a decode replica."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def endpoint(self, request: Request) -> Response:
        """Return the joined list, without models whose engines fail.

        Return status 503 if no model answers. Return the error of a model whose engines have no
        free slot (503), have a full queue (429) or are late (504).
        """
        call = Call("GET", "/v1/models", forwarded_headers(request))
        cards: list[Any] = []
        answered = False
        for model in self._router.models:
            if not model.ready:
                continue
            try:
                async with ask_decode([model], call) as (start, body):
                    content = b"".join([piece async for piece in body])
                if start.status != HTTPStatus.OK:
                    raise EngineError(f"status {start.status}: {content[:200].decode(errors='replace')}")
                cards += json.loads(content)["data"]
                answered = True
            except (BusyError, DeadlineError, OverloadedError) as error:
                # A list without the model would tell clients that it does not exist.
                return error_response(error, self._router.limits.retry_after_s)
            except (TandemError, ValueError, KeyError, TypeError) as error:
                logger.warning(
                    "cannot list the models of %s, so /v1/models omits them: %s", model.names[0], with_causes(error)
                )
        if not answered:
            nobody = UnavailableError("no decode engine has listed its models; retry later")
            return error_response(nobody, self._router.limits.retry_after_s)
        return JSONResponse({"object": "list", "data": cards})


class AdapterEndpoints:
    """Endpoints `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`; each changes all engines of
    a model.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    async def load(self, request: Request) -> Response:
        """Load an adapter on all engines of its model; after a failure, unload it again.

        An engine that does not answer may keep the adapter.
        """
        return await self._answer(request, self._load)

    async def unload(self, request: Request) -> Response:
        return await self._answer(request, self._unload)

    async def _answer(self, request: Request, change: Any) -> Response:
        limits = self._router.limits
        try:
            body = await read_body(request, MAX_BODY_BYTES, limits.body_timeout_s)
            return Response(await change(parse_body(body)))
        except ClientDisconnect:
            return Response(status_code=HTTPStatus.BAD_REQUEST)
        except AdapterError as error:
            return JSONResponse(error.body, status_code=error.status)
        except AdapterNameError as error:
            return error_response(InvalidAdapterError(str(error)), limits.retry_after_s)
        except Exception as error:
            if status_of(error) is HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.exception("cannot load or unload an adapter; the client gets HTTP 500")
            return error_response(error, limits.retry_after_s)

    async def _load(self, body: dict[str, Any]) -> str:
        name, path = _text(body, "lora_name"), _text(body, "lora_path", MAX_PATH_CHARACTERS)
        if not name or not path:
            raise InvalidAdapterError("Both 'lora_name' and 'lora_path' must be provided.")
        if body.get("load_inplace"):
            raise InvalidAdapterError(
                "load_inplace is not supported: two engines would have different weights of one name for a moment. "
                "Unload the adapter and load it from another path"
            )
        if any(name in one.names for one in self._router.models):
            raise InvalidAdapterError(f"The lora adapter '{name}' conflicts with a served base model.")
        model = self._model(_text(body, "base_model_name"))
        await self._router.adapters.load(model, name, path, body.get("is_3d_lora_weight") is True)
        logger.info("loaded adapter %s from %s", name, path)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def _unload(self, body: dict[str, Any]) -> str:
        name = _text(body, "lora_name")
        if not name:
            raise InvalidAdapterError("'lora_name' needs to be provided to unload a LoRA adapter.")
        base = _text(body, "base_model_name")
        model = self._model(base) if base or len(self._router.models) == 1 else None
        model = model or await self._router.adapters.model_of(name)
        if model is None:
            raise BadRequestError(f"The lora adapter '{name}' cannot be found.", status=HTTPStatus.NOT_FOUND)
        if not model.allows_adapters:
            raise _not_allowed(model.names)
        await self._router.adapters.unload(model, name)
        logger.info("unloaded adapter %s", name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _model(self, name: str) -> ModelRouter:
        """Return the model named by `base_model_name`; with one model, the name is optional.

        Raises BadRequestError for an unknown name, for no name if there are several models, and for
        a named model whose adapters clients may not change. A service without `models` accepts any
        name.
        """
        models = self._router.models
        if len(models) == 1 and not name:
            return models[0]
        if not name:
            names = ", ".join(one.names[0] for one in models)
            raise InvalidAdapterError(f"'base_model_name' must be one of the models: {names}")
        found = next((one for one in models if name in one.names or not one.names), None)
        if found is None:
            raise BadRequestError(f"The model `{name}` does not exist.", "base_model_name", HTTPStatus.NOT_FOUND)
        if not found.allows_adapters:
            raise _not_allowed(found.names)
        return found


class InvalidAdapterError(BadRequestError):
    """An invalid request to load or unload an adapter; its error has the `type` of vLLM's."""

    kind = "InvalidUserInput"


def _not_allowed(names: Sequence[str]) -> BadRequestError:
    return BadRequestError(
        f"clients may not load or unload adapters of the model {names[0]}; an operator can allow it with "
        "`allow_runtime_lora_updating`",
        status=HTTPStatus.NOT_FOUND,
    )


def _text(body: dict[str, Any], field: str, most: int = MAX_NAME_CHARACTERS) -> str:
    """Return the string in `field` of the body, or "".

    Raises BadRequestError for another type, and for a string that is not printable or has more than
    `most` characters: engines log it, and repeat an adapter's name in each chunk.
    """
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        raise BadRequestError(f"`{field}` must be a string", field)
    if value and (len(value) > most or not value.isprintable()):
        raise BadRequestError(f"`{field}` must have at most {most} characters, all printable", field)
    return value or ""
