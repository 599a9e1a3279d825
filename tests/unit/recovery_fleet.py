"""RolloutActor over fake engines, and what its tests do with them."""

import asyncio

from rollout.actor import RolloutActor
from tests.unit.fake_engine import FakeEngine, Fleet

QUICK = {"max_restarts": 1000, "backoff_s": 0.0, "wait_s": 10.0}


def make(fleet=None, **recovery) -> tuple[RolloutActor, Fleet]:
    fleet = fleet or Fleet()
    return RolloutActor("unused", recovery=QUICK | recovery, engine_factory=fleet), fleet


def sampling(length: int, **more) -> dict:
    return {"max_new_tokens": length, **more}


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def new_engine(fleet: Fleet, dead: FakeEngine) -> FakeEngine:
    async with asyncio.timeout(5):
        while fleet.last is dead:
            await asyncio.sleep(0.001)
    await settled()
    return fleet.last


async def finish(fleet: Fleet, batch: asyncio.Future):
    """Lets the engines generate until the batch has been answered."""
    async with asyncio.timeout(10):
        while not batch.done():
            fleet.last.advance(5)
            await asyncio.sleep(0.001)
    return await batch
