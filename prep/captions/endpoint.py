"""Captions from a server with an OpenAI-compatible API, requested in parallel. Only this module imports `openai`.

    row ──► thread: read ──► decode, JPEG, JSON ──► request, one of `in_flight` ──► thread: journal

Rows are prepared ahead, so that the next request is ready when one ends. A single thread does all CPU work, because
there is usually one worker per core, and switching between threads takes a third more CPU time. The client retries
failed requests (status 408, 409, 429 or 5xx, timeout, broken connection) with exponential backoff and jitter, or after
the time in the Retry-After header. Requests and responses are passed as bytes, because converting them to the client's
message classes takes as long as decoding.
"""

import asyncio
import json
import os
import time
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import on_one_line
from clipmill.manifests.publish import parse_json
from clipmill.prep.captions.answers import KEY_VARIABLE, Answer, CaptionTask, jpeg_data_url, without_key
from clipmill.prep.captions.recipe import CaptionsSettings
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.shard_result import Stop

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_NO_KEY = "none"  # placeholder: local servers need no key, but the client requires one
_MAX_ATTEMPTS = 3  # maximum number of times to send a request whose responses contain no answer
_MAX_FAILED = 8  # number of consecutive failed requests after which no more requests are sent for the shard
_MAX_AHEAD = 16  # maximum number of rows that are prepared ahead of the requests in flight
# Status codes that every request would receive: the key is invalid, no credit is left, or the URL is wrong.
_FATAL_STATUSES = (401, 402, 403, 404, 405)
_TRANSIENT_STATUSES = (408, 409, 429)  # status codes that the client retries, in addition to 5xx


class Endpoint:
    """Captioner that sends requests to a server.

    Args:
        settings: Settings, with the prompt already read from `prompt_file`.
        in_flight: Maximum number of parallel requests.
        retries: Maximum number of retries of a request.
        timeout_s: Timeout of each request in seconds.

    Raises:
        UserError: See `require_client`.
    """

    def __init__(self, settings: CaptionsSettings, *, in_flight: int, retries: int, timeout_s: float) -> None:
        require_client()
        self._settings, self._in_flight = settings, in_flight
        self._retries, self._timeout_s = retries, timeout_s
        self._key = os.environ.get(KEY_VARIABLE) or _NO_KEY
        self._stop: Stop | None = None
        self._num_failed = 0  # number of failed requests since the last answer

    def caption(self, task: CaptionTask) -> Stop | None:
        """Caption all rows (see `Captioner` in `answers.py`). All requests have ended when the method returns."""
        self._stop, self._num_failed = None, 0
        asyncio.run(self._caption_all(task))
        return self._stop

    async def _caption_all(self, task: CaptionTask) -> None:
        from openai import AsyncOpenAI, DefaultAioHttpClient

        slots = asyncio.Semaphore(self._in_flight)
        async with AsyncOpenAI(
            base_url=self._settings.endpoint,
            api_key=self._key,
            max_retries=self._retries,
            timeout=self._timeout_s,
            http_client=DefaultAioHttpClient(),  # takes less CPU time per request than the default, httpx
        ) as client:
            num_tasks = self._in_flight + min(self._in_flight, _MAX_AHEAD)
            tasks = (self._caption_rows(task, client, slots) for _ in range(num_tasks))
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                if error is not None:
                    raise error

    async def _caption_rows(self, task: CaptionTask, client: "AsyncOpenAI", slots: asyncio.Semaphore) -> None:
        while (row := next(task.rows, None)) is not None and not self._has_to_stop(task):
            try:
                settings, chunk = self._settings, await asyncio.to_thread(task.read, row)
                urls = map(jpeg_data_url, task.pictures(chunk))
                pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
                content = [*pictures, {"type": "text", "text": settings.prompt}]
                sampling = {"top_p": settings.top_p, "seed": None if settings.seed is None else task.seed(row)}
                body = {
                    "model": settings.model,
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": settings.max_tokens,
                    "temperature": settings.temperature,
                    **{name: value for name, value in sampling.items() if value is not None},
                }
                request = json.dumps(body).encode()
            except SourceFailure as failure:
                task.keep(row, failure)
                continue
            async with slots:
                if self._has_to_stop(task):
                    return
                try:
                    result: Answer | SourceFailure = await self._ask(client, request)
                except SourceFailure as failure:
                    result = failure
                # The answer must be on disk, and its tokens counted, before the next request.
                try:
                    await asyncio.to_thread(task.keep, row, result)
                except OSError as error:  # the other requests in flight still complete
                    self._stop = self._stop or Stop(FailureCode.IO_ERROR, str(error))
                    raise

    def _has_to_stop(self, task: CaptionTask) -> bool:
        self._stop = self._stop or task.stop()
        return self._stop is not None

    async def _ask(self, client: "AsyncOpenAI", request: bytes) -> Answer:
        """Send the request for a chunk and return the answer in the response.

        Raises:
            SourceFailure: No usable response was received.
        """
        import openai

        start_s = time.monotonic()
        try:
            for _ in range(_MAX_ATTEMPTS):
                content = await client.post("/chat/completions", cast_to=bytes, content=request)
                answer = self._parse_answer(content, start_s=start_s)
                if answer is not None:
                    self._num_failed = 0
                    problem = answer.problem(self._settings.model)
                    if problem is not None and problem.code == FailureCode.OTHER_MODEL:
                        self._stop = self._stop or Stop(problem.code, problem.message)
                    return answer
            failure = SourceFailure(FailureCode.ENDPOINT_FAILED, "the server's response contains no answer")
        except openai.APIConnectionError as error:
            failure = SourceFailure(FailureCode.ENDPOINT_FAILED, self._error_text(error))
        except openai.APIStatusError as error:
            if error.status_code in _FATAL_STATUSES:
                self._stop = self._stop or Stop(FailureCode.ENDPOINT_REFUSED, self._error_text(error))
                raise SourceFailure(FailureCode.ENDPOINT_REFUSED, self._error_text(error)) from None
            if error.status_code not in _TRANSIENT_STATUSES and error.status_code < 500:
                raise SourceFailure(FailureCode.REQUEST_INVALID, self._error_text(error)) from None
            failure = SourceFailure(FailureCode.ENDPOINT_FAILED, self._error_text(error))
        self._num_failed += 1
        if self._num_failed >= _MAX_FAILED:
            self._stop = self._stop or Stop(failure.code, failure.message)
        raise failure

    def _parse_answer(self, content: bytes, *, start_s: float) -> Answer | None:
        """Parse a response; return None if it contains no answer, for example because it is truncated.

        Args:
            start_s: Monotonic time at which the request was sent.
        """
        try:
            completion = parse_json(content)
            choice, usage = completion["choices"][0], completion.get("usage")
            counts = usage if isinstance(usage, dict) else {}
            answer = Answer(
                text=choice["message"].get("content") or "",
                finish_reason=choice.get("finish_reason"),
                tokens_in=counts.get("prompt_tokens"),
                tokens_out=counts.get("completion_tokens"),
                seconds=round(time.monotonic() - start_s, 3),
                model=completion["model"],
                refusal=choice["message"].get("refusal"),
            )
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
        # If the server never reports a finish reason, only the number of tokens shows that the text was cut off.
        is_cut = answer.finish_reason is None and (answer.tokens_out or 0) >= self._settings.max_tokens
        return replace(answer, finish_reason="length") if is_cut else answer

    def _error_text(self, error: Exception) -> str:
        """Return the message of an error on one line, without the API key.

        The message of the cause is preferred, because openai reports a closed port as a timeout.
        """
        cause = error.__cause__
        text = str(error) if cause is None else str(cause) or f"{error}: {type(cause).__name__}"
        return on_one_line(without_key(text))


def require_client() -> None:
    """Check that `openai` and `aiohttp` are installed, and that the API key can be sent in a header.

    The packages are not imported, because that would take a second.

    Raises:
        UserError: A package is missing, or the key contains a character that a header cannot contain.
    """
    for name in ("openai", "aiohttp"):
        if find_spec(name) is None:
            raise UserError(f"{name} is not installed", hint="install clipmill[endpoint]")
    key = os.environ.get(KEY_VARIABLE, "")
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"{KEY_VARIABLE} contains a line feed or another character that an API key cannot contain",
            hint="set the variable to the key and nothing else",
        )
