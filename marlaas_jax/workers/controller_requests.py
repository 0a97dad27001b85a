"""Requests that somebody waits for, beside those of rollouts: to the same device, and what it answers back to who asked.

Nothing is kept here beyond the device's answers. A request whose asker has gone is cancelled, and forgotten once the device
has answered for all its samples or is gone itself.
"""

import asyncio
import secrets
from collections.abc import Callable

import msgspec

from marlaas_jax.errors import WorkerLost
from marlaas_jax.messages import CancelGenerate, Generate, Generated, GeneratedPart, Message

PREFIX = "api/"
ENDING = "the service is ending"

Answer = Generated | GeneratedPart
OnEnd = Callable[[list[Generated]], None]


class Requests:
    """The open requests, by id. For the event loop's thread."""

    def __init__(self, send: Callable[[Message], None]):
        """`send` reaches the present device."""
        self._send = send
        self._open: dict[str, Ticket] = {}
        self._may_go_on = asyncio.Event()  # there is a device, or there will be none
        self._closed = ""

    @property
    def num_open(self) -> int:
        """Requests that the device has not answered in full."""
        return len(self._open)

    @property
    def has_device(self) -> bool:
        """Whether there is a device to send to."""
        return self._may_go_on.is_set() and not self._closed

    async def device(self) -> None:
        """Returns once there is a device. Raises WorkerLost if there will be none."""
        await self._may_go_on.wait()
        if self._closed:
            raise WorkerLost(self._closed)

    def start(self, message: Generate, answers: asyncio.Queue[Answer | None], on_end: OnEnd) -> "Ticket":
        """Sends a request under an id of its own; what is answered is put into `answers`, None if the device is lost.

        `on_end` is called with all completions once there are as many as samples; never, if the device is lost before.
        """
        request_id = PREFIX + secrets.token_hex(12)
        ticket = self._open[request_id] = Ticket(self, request_id, len(message.seeds), answers, on_end)
        if self.has_device:
            self._send(msgspec.structs.replace(message, request_id=request_id))
        else:
            self.device_gone()
        return ticket

    def owns(self, message: Answer) -> bool:
        """Whether it answers a request from here, however old."""
        return message.request_id.startswith(PREFIX)

    def on_answer(self, message: Answer) -> None:
        """Hands an answer on; one that nobody waits for any more is dropped."""
        ticket = self._open.get(message.request_id)
        if ticket is None:
            return
        if isinstance(message, Generated):
            ticket.done[message.sample] = message
        if not ticket.is_cancelled:
            ticket.answers.put_nowait(message)
        if len(ticket.done) == ticket.num_samples:
            del self._open[message.request_id]
            ticket.on_end(list(ticket.done.values()))

    def cancel(self, ticket: "Ticket") -> None:
        """Ends a request; its asker hears no more of it."""
        if ticket.request_id in self._open and not ticket.is_cancelled:
            ticket.is_cancelled = True
            self._send(CancelGenerate(ticket.request_id))

    def device_joined(self) -> None:
        """There is a device."""
        if not self._closed:
            self._may_go_on.set()

    def device_gone(self) -> None:
        """Tells all who wait that their device is lost."""
        self._may_go_on.clear()
        lost, self._open = self._open, {}
        for answers in {id(ticket.answers): ticket.answers for ticket in lost.values() if not ticket.is_cancelled}.values():
            answers.put_nowait(None)

    def close(self, reason: str = ENDING) -> None:
        """There will be no device any more."""
        self._closed = self._closed or reason
        self.device_gone()
        self._may_go_on.set()


class Ticket:
    """One open request."""

    def __init__(
        self, requests: Requests, request_id: str, num_samples: int, answers: asyncio.Queue[Answer | None], on_end: OnEnd
    ):
        self.request_id = request_id
        self.num_samples = num_samples
        self.answers = answers
        self.on_end = on_end
        self.done: dict[int, Generated] = {}  # by sample
        self.is_cancelled = False
        self._requests = requests

    def cancel(self) -> None:
        """Ends the request, if it has not ended."""
        self._requests.cancel(self)
