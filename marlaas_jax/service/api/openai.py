"""Sampling over HTTP in OpenAI's shapes, errors included: models, completions and chat completions, whole or streamed."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable
from typing import Annotated, Any, TypeVar

import pydantic
from fastapi import APIRouter, Query, Request, Response, Security
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from marlaas_jax.errors import InvalidRequest, NotFound
from marlaas_jax.service.api.errors import Refused, respond
from marlaas_jax.service.api.json_body import Json, JsonRequest, parse, to_json
from marlaas_jax.service.api.openai_answers import Answer, Wanted
from marlaas_jax.service.api.openai_bodies import DEFAULT_TOKENS, ChatCompletion, Completion, SamplingBody
from marlaas_jax.service.api.route import Api, Caller, KeyRoute, TheApi, bearer
from marlaas_jax.service.sampling import Order, Piece, Work
from marlaas_jax.store import jobs as job_table
from marlaas_jax.store.jobs import JobFilter, JobRecord

SHORT_CHARACTERS = 2000  # a longer prompt is encoded in a thread, so that others do not wait
CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
CLIENT_GONE = 499  # as nginx has it; nobody reads it

T = TypeVar("T")


class OpenAIRoute(KeyRoute):
    """A route whose failures are told as OpenAI tells them, with our `kind` beside."""

    def refusal(self, error: Exception, body_model: type[pydantic.BaseModel] | None) -> Response:
        """Returns how a failure is answered."""
        ours = respond(error, body_model)
        status = 400 if ours.status_code == 422 else ours.status_code
        told = parse(bytes(ours.body))["error"]
        response = Json({"error": error_document(status, told["kind"], told["message"])}, status)
        if (retry_after := ours.headers.get("Retry-After")) is not None:
            response.headers["Retry-After"] = retry_after
        return response

    def is_done_once(self, request: JsonRequest) -> bool:
        """Whether an Idempotency-Key counts: not for a stream."""
        document = request.document
        return request.method == "POST" and not (isinstance(document, dict) and document.get("stream"))


router = APIRouter(tags=["sampling"], route_class=OpenAIRoute, dependencies=[Security(bearer)])


@router.get("/models")
async def list_models(
    api: TheApi,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=job_table.MAX_PAGE)] = job_table.MAX_PAGE,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.")] = None,
) -> Response:
    """Lists the base and, the newest job first, the adapters that can be sampled from; to an admin those of all tenants."""
    scope = None if caller.is_admin else caller.id
    page = await api.store.aread(job_table.list_jobs, JobFilter(tenant_id=scope), limit=limit, cursor=cursor)
    found = [] if cursor else [_base(api)]
    for record in page.jobs:
        found += [document for document in [await _adapter(api, record)] if document is not None]
    return Json({"object": "list", "data": found, "next_cursor": page.next_cursor})


@router.get("/models/{model:path}")
async def show_model(api: TheApi, caller: Caller, model: str) -> Response:
    """Shows a model: the base, JOB (its newest version) or JOB@STEP (a committed step)."""
    found = await api.service.sampling.model(caller, model)
    if found.record is None:
        return Json(_base(api))
    document = await _adapter(api, found.record)
    if document is None or (found.step is not None and found.step not in document["steps"]):
        raise NotFound(f"model={model[:80]!r}: no such committed step")
    return Json(document | {"id": found.name})


@router.post("/completions", response_class=Json)
async def complete(api: TheApi, caller: Caller, request: Request, body: Completion) -> Response:
    """Continues each prompt `n` times. Fields of OpenAI's that would change the answer and are not known are refused."""
    model = await api.service.sampling.model(caller, body.model)
    texts = body.prompts()
    if sum(len(text) for text in texts if isinstance(text, str)) > SHORT_CHARACTERS:
        prompts = await asyncio.to_thread(_encoded, api, texts)
    else:
        prompts = _encoded(api, texts)
    max_tokens = _checked(api, prompts, body.max_tokens, DEFAULT_TOKENS)
    order = Order(caller, model, prompts, body.seeds(), body.sampling(max_tokens), body.stream)
    return await _answer(
        api, request, order, body, Wanted(False, body.logprobs is not None, body.return_token_ids, body.include_usage)
    )


@router.post("/chat/completions", response_class=Json)
async def chat(api: TheApi, caller: Caller, request: Request, body: ChatCompletion) -> Response:
    """Answers a conversation, written by the model's chat template, `n` times. Unknown fields are refused likewise."""
    model = await api.service.sampling.model(caller, body.model)
    messages = [message.plain() for message in body.messages]
    ids = await asyncio.to_thread(api.service.controller.tokenizer.render, messages)
    prompts = (tuple(ids),)
    max_tokens = _checked(api, prompts, body.limit, None)
    order = Order(caller, model, prompts, body.seeds(), body.sampling(max_tokens), body.stream)
    return await _answer(api, request, order, body, Wanted(True, body.logprobs, body.return_token_ids, body.include_usage))


def error_document(status: int, kind: str, message: str) -> dict[str, Any]:
    """Returns an error as OpenAI tells it."""
    field = re.match(r"([a-z_.0-9]+)[=:]", message)
    sort = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    param = field[1] if field is not None and status == 400 else None
    return {"message": message, "type": sort, "param": param, "code": CODES.get(status), "kind": kind}


# ---- models


def _base(api: Api) -> dict[str, Any]:
    base = api.service.sampling.base
    return {"id": base, "object": "model", "created": 0, "owned_by": "service", "parent": None, "steps": []}


async def _adapter(api: Api, record: JobRecord) -> dict[str, Any] | None:
    """Returns a job as a model; None if there is nothing of it yet to sample from."""
    desk = api.service.sampling
    steps = list(await desk.stored_steps(record))
    if not steps and not desk.is_published(record):
        return None
    return {
        "id": record.id, "object": "model", "created": int(record.created), "owned_by": record.tenant_id, "parent": desk.base,
        "steps": steps,
    }  # fmt: skip


# ---- prompts


def _encoded(api: Api, prompts: list[str | list[int]]) -> tuple[tuple[int, ...], ...]:
    tokenizer = api.service.controller.tokenizer
    return tuple(tuple(tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt) for prompt in prompts)


def _checked(api: Api, prompts: tuple[tuple[int, ...], ...], asked: int | None, default: int | None) -> int:
    """Returns the limit of an answer. Raises InvalidRequest for a prompt that leaves no room for it, or is none."""
    limit, vocab_size = api.service.sampling.max_context, api.service.sampling.vocab_size
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest("prompt: has no token; at least one is needed")
        if wrong := [token for token in prompt if not 0 <= token < vocab_size]:
            raise InvalidRequest(f"prompt: token id {str(wrong[0])[:20]} is none of the model's, 0 to {vocab_size - 1}")
    longest = max(map(len, prompts))
    wanted = 1 if asked is None else asked
    if longest + wanted > limit:
        given = "" if asked is None else f" and max_tokens={asked}"
        raise InvalidRequest(f"prompt: {longest} tokens{given} are too many for the context of {limit} tokens")
    room = limit - longest
    return asked or (room if default is None else min(default, room))


# ---- answers


async def _answer(api: Api, request: Request, order: Order, body: SamplingBody, wanted: Wanted) -> Response:
    work = api.service.sampling.take(order)
    answer = Answer(order, wanted, api.service.controller.tokenizer)
    try:
        if not body.stream:
            return Json(answer.whole(await _unless_gone(request, work.all())))
        pieces = work.pieces()
        first = await _unless_gone(request, anext(pieces))  # so that a refusal still has a status of its own
        response = _Stream(work, _events(first, pieces, answer, body.include_usage))
        work = None
        return response
    finally:
        if work is not None:
            work.close()


async def _unless_gone(request: Request, doing: Awaitable[T]) -> T:
    """Returns what is being done, unless the client goes away first."""
    work, gone = asyncio.ensure_future(doing), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Refused(CLIENT_GONE, InvalidRequest, "the client has gone")
        return work.result()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream(StreamingResponse):
    """A stream whose end, however it comes, closes the work."""

    def __init__(self, work: Work, events: AsyncIterator[str]):
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.close()


async def _events(first: Piece, rest: AsyncIterator[Piece], answer: Answer, include_usage: bool) -> AsyncIterator[str]:
    """Yields a stream's events. What fails once it has begun is its last one."""
    piece = first
    try:
        while True:
            for chunk in answer.chunks(piece):
                yield _event(chunk)
            try:
                piece = await anext(rest)
            except StopAsyncIteration:
                break
    except Exception as error:  # too late for a status
        failed = respond(error)
        told = parse(bytes(failed.body))["error"]
        yield _event({"error": error_document(failed.status_code, told["kind"], told["message"])})
        return
    if include_usage:
        yield _event(answer.last_chunk(piece))
    yield "data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> str:
    return f"data: {to_json(document)}\n\n"
