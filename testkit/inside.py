"""The internals that tests look into, each named once: if one moves, only this module changes."""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from baton.handoff.agent.agent import HandoffAgent
from baton.handoff.agent.rank_handoffs import RankHandoffs
from baton.handoff.protocol.messages import Hello
from baton.handoff.session.accepted import AcceptedConnections
from baton.handoff.session.sessions import Sessions
from baton.transports.remote.driver import Driver


def engine_of(front: Any) -> Any:
    """The `Engine` of an `LLM` or an `AsyncEngine`."""
    return front._engine


def rank_handoffs_of(agent: HandoffAgent) -> RankHandoffs:
    """What an agent runs on its thread."""
    return agent._handoffs


def is_woken(agent: HandoffAgent) -> bool:
    """Whether the agent's thread was told that there are calls, and has not begun to do them."""
    return agent._woken


def hello_of(sessions: Sessions) -> Hello:
    """The HELLO that an engine sends, without challenge and descriptor."""
    return sessions.greeting.hello


def change_hello(sessions: Sessions, **changes: Any) -> None:
    sessions.greeting.hello = msgspec.structs.replace(sessions.greeting.hello, **changes)


def driver_of(transport: Any) -> Driver:
    """The thread of a transport over a library."""
    found: Driver = transport._driver
    return found


def library_of(transport: Any) -> Any:
    return transport._library


def peers_of(transport: Any) -> Any:
    """The peers that a transport is connected with."""
    return transport._peers


def legs_of(agent: Any) -> dict[Any, Any]:
    """The handoffs that an instance's agent keeps, by key."""
    found: dict[Any, Any] = agent._legs
    return found


def thread_of(owner: Any) -> threading.Thread:
    found: threading.Thread = owner._thread
    return found


def processes_of(owner: Any) -> Any:
    """The child processes of a server or a launcher."""
    found = owner._processes
    return found() if callable(found) else found


def process_of(peer: Any) -> Any:
    """The process of a `SpawnedPeer`."""
    return peer._process


def accepted_of(channel: Any) -> AcceptedConnections:
    """Connections that a channel has accepted."""
    found: AcceptedConnections = channel._accepted
    return found


def kept_features(stepped: Any) -> dict[int, Any]:
    """The target's features that an engine keeps for drafter rows that wait, by step."""
    found: dict[int, Any] = stepped.core.executor._outputs
    return found
