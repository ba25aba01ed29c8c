"""What happens in a round, drawn from its seed alone: pure, so that a round can be had again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from storage.checkpoints.buffers import Tier
from tests.storage.checkpoints.kills.faults import (
    DISK_FILES,
    ROOT,
    Deed,
    Fault,
    Site,
    choose_site,
)

START_S, TRAINING_S = 0.3, 0.7
"""About what it takes to begin, and then to train to the end: times are drawn from these."""
WAKES = ("start", "loading", "resumed", "committed", "end")
MOST_TIMES = 8
DISK_SHARE = 0.4
CHANCES = (0.95, 0.6, 0.4, 0.25)
"""That something happens to the first attempt, the second, and so on; then nothing does."""

_ROLES = {"rank0": 3, "rank1": 2, "flusher0": 3, "flusher1": 1}
_DEEDS = {
    Deed.KILL: 50,
    Deed.ZOMBIE: 22,
    Deed.PAUSE: 6,
    Deed.NODE: 8,
    Deed.TWIN: 12,
    Deed.DELAY: 8,
    Deed.JITTER: 14,
}


WEAKEST = (
    ("flusher0", "commit", "created = ledger.store.create(", Deed.ZOMBIE, "end"),
    ("flusher0", "commit", "created = ledger.store.create(", Deed.ZOMBIE, "resumed"),
    ("flusher0", "flusher", "self._folder.free(sealed)", Deed.TWIN, ""),
    ("rank0", "staging", "target.copy_(source)", Deed.KILL, ""),
    ("rank0", "staging", "target.copy_(source)", Deed.DELAY, ""),
    ("rank1", "staging", "self._copied.set()", Deed.DELAY, ""),
    ("flusher0", "flush", "store.put(key, encode_sealed(part))", Deed.KILL, ""),
    ("flusher0", "disk", "temporary.replace(path)", Deed.NODE, ""),
    ("flusher0", "disk", "path.unlink(missing_ok=True)", Deed.ZOMBIE, "loading"),
)
"""Where a save hangs by a thread: a round for each comes first. By role, module and text."""


class Loss(StrEnum):
    """What becomes of a node's own disk when the node dies."""

    NONE = "kept"
    EMPTIED = "emptied"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class DiskPlan:
    """A tier nearer than the store: a folder that all nodes share, or one for each of them."""

    every_steps: int = 1
    is_shared: bool = True
    loss: Loss = Loss.NONE

    def __str__(self) -> str:
        whose = "a shared disk" if self.is_shared else f"disks of the nodes' own, {self.loss}"
        return f"{whose}, every {self.every_steps} steps"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A round. `faults` are those of its attempts, in their order; `worlds` their ranks."""

    seed: int
    nodes: int = 1
    buffers: int = 2
    every_steps: int = 3
    disk: DiskPlan | None = None
    step_s: float = 0.0
    waits: bool = True
    awaits_last: bool = False
    worlds: tuple[int, ...] = (2,)
    faults: tuple[tuple[Fault, ...], ...] = ()
    server_kills_s: tuple[float, ...] = ()
    """After the first resume: training shall go on meanwhile, without a save if need be."""

    def world(self, attempt: int) -> int:
        """Of attempts from 1 on; those without a number of their own take the last one."""
        return self.worlds[min(attempt, len(self.worlds)) - 1]

    def tiers(self, step: int, *, is_last: bool) -> tuple[Tier, ...]:
        """Where the save of a step goes to; the last one goes everywhere."""
        intervals = {Tier.STORE: self.every_steps}
        if self.disk is not None:
            intervals[Tier.DISK] = self.disk.every_steps
        return tuple(tier for tier, every in intervals.items() if is_last or step % every == 0)

    def faults_of(self, attempt: int) -> tuple[Fault, ...]:
        return self.faults[attempt - 1] if attempt <= len(self.faults) else ()

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.nodes} nodes, {self.buffers} buffers, ranks {self.worlds}, "
            f"every {self.every_steps} steps of {self.step_s:.3f} s, {self.disk or 'no disk'}, "
            f"{'waits for' if self.waits else 'skips without'} a free buffer, "
            f"{'awaits' if self.awaits_last else 'does not await'} the last save"
            + "".join(f", server killed {one:.2f} s after resumed" for one in self.server_kills_s)
        ]
        for number, faults in enumerate(self.faults, start=1):
            lines.extend(f"  attempt {number}: {fault}" for fault in faults)
        return "\n".join(lines)


def draw(seed: int, sites: tuple[Site, ...], *, server_kills: bool = False) -> Plan:
    """A random round."""
    random = Random(f"round {seed}")
    disk = _draw_disk(seed)
    if disk is None:
        sites = without_disk(sites)
    nodes = random.choice((1, 1, 2))
    worlds = tuple(random.choices((2, 1, 3), (7, 1, 1))[0] for _ in CHANCES)
    worlds = tuple(max(world, nodes) for world in worlds)
    faults = []
    for world, chance in zip(worlds, CHANCES, strict=True):
        roles = _roles(world, nodes)
        drawn: list[Fault] = []
        if random.random() < (chance / 2 if server_kills else chance):
            for _ in range(random.choice((1, 1, 1, 2))):
                drawn.extend(_draw_fault(random, sites, roles))
        faults.append(tuple(drawn))
    every_steps = random.choice((1, 2, 3))
    kills = sorted(random.uniform(0.0, 2.0) for _ in range(random.choice((1, 1, 2))))
    return Plan(
        seed=seed,
        nodes=nodes,
        buffers=random.choice((1, 2, 2)),
        every_steps=every_steps if disk is None else disk.every_steps * (every_steps + 1),
        disk=disk,
        step_s=random.choice((0.0, 0.01, 0.03)) + (0.15 if server_kills else 0.0),
        waits=random.random() < 0.8 and not server_kills,
        awaits_last=random.random() < 0.5,
        worlds=worlds,
        faults=tuple(faults),
        server_kills_s=tuple(kills) if server_kills else (),
    )


def _draw_disk(seed: int) -> DiskPlan | None:
    """With luck of its own: a round without a disk is what it would be if there were none."""
    random = Random(f"disk {seed}")
    if random.random() >= DISK_SHARE:
        return None
    return DiskPlan(
        every_steps=random.choice((1, 1, 2)),
        is_shared=random.random() < 0.5,
        loss=random.choice(tuple(Loss)),
    )


def without_disk(sites: tuple[Site, ...]) -> tuple[Site, ...]:
    return tuple(site for site in sites if not site.file.endswith(DISK_FILES))


def weakest(seed: int, sites: tuple[Site, ...]) -> Iterator[Plan]:
    """The rounds of WEAKEST. Raises AssertionError where the product has no such line any more."""
    for number, (role, module, text, deed, wakes) in enumerate(WEAKEST):
        site = _find(sites, role, f"storage/checkpoints/{module}.py", text)
        fault = Fault(role=role, deed=deed, site=site, nth=2, lasts_s=0.2, wakes=wakes)
        yield Plan(
            seed=seed - len(WEAKEST) + number,
            step_s=0.01,
            disk=DiskPlan() if module == "disk" else None,
            faults=((fault,),),
        )


def _find(sites: tuple[Site, ...], role: str, file: str, text: str) -> Site:
    lines = (ROOT / file).read_text().splitlines()
    found = [
        site
        for site in sites
        if (site.role, site.file) == (role, file) and text in lines[site.line - 1]
    ]
    assert found, f"{role} comes to no line with {text!r} in {file}: what took its place?"
    return found[0]


def at_site(seed: int, site: Site, deed: Deed) -> Plan:
    """A round in which a process meets this fault in its first attempt.

    In its second where the line is one of loading from a disk, for which a save must be there.
    """
    random = Random(f"site {seed} {site} {deed}")
    nodes = 2 if site.role == "flusher1" else random.choice((1, 2))
    fault = Fault(
        role=site.role,
        deed=deed,
        site=site,
        nth=_nth(random, site),
        lasts_s=random.uniform(0.02, 0.3),
        wakes=random.choice(WAKES) if deed is Deed.ZOMBIE else "",
    )
    plan = Plan(
        seed=seed,
        nodes=nodes,
        buffers=random.choice((1, 2)),
        every_steps=random.choice((1, 2, 3)),
        step_s=random.choice((0.0, 0.01, 0.03)),
        waits=random.random() < 0.8,
        awaits_last=random.random() < 0.5,
        faults=((fault,),),
    )
    if not site.file.endswith(DISK_FILES):
        return replace(plan, disk=_draw_disk(seed))
    plan = replace(plan, disk=_draw_disk(seed) or DiskPlan(), every_steps=5)
    if site.role.startswith("flusher"):
        return plan
    end = Fault(role="rank1", deed=Deed.KILL, since="resumed", after_s=random.uniform(0.1, 0.3))
    return replace(plan, step_s=0.03, faults=((end,), (fault,)))


def _roles(world: int, nodes: int) -> Sequence[str]:
    ranks = [f"rank{rank}" for rank in range(min(world, 2))]
    return [*ranks, "flusher0", *(["flusher1"] if nodes > 1 else ())]


def _draw_fault(random: Random, sites: tuple[Site, ...], roles: Sequence[str]) -> list[Fault]:
    role = random.choices(roles, [_ROLES[one] for one in roles])[0]
    is_flusher = role.startswith("flusher")
    deeds = [deed for deed in _DEEDS if is_flusher or deed is not Deed.TWIN]
    deed = random.choices(deeds, [_DEEDS[one] for one in deeds])[0]
    faults = [_fault(random, sites, role, deed)]
    while is_flusher and deed is Deed.KILL and random.random() < 0.35:
        faults.append(_fault(random, sites, role, deed, incarnation=len(faults)))
    return faults


def _fault(
    random: Random, sites: tuple[Site, ...], role: str, deed: Deed, *, incarnation: int = 0
) -> Fault:
    at_line = deed is Deed.DELAY or (deed is not Deed.JITTER and random.random() < 0.75)
    site = choose_site(random, sites, role) if at_line else None
    since = random.choices(("resumed", "start"), (4, 1))[0]
    return Fault(
        role=role,
        deed=deed,
        incarnation=incarnation,
        site=site,
        nth=1 if site is None else _nth(random, site),
        since=since,
        after_s=random.uniform(0.0, START_S if since == "start" else TRAINING_S),
        lasts_s=random.uniform(0.02, 0.3),
        wakes=random.choice(WAKES) if deed is Deed.ZOMBIE else "",
    )


def _nth(random: Random, site: Site) -> int:
    return random.randint(1, min(site.times, MOST_TIMES))
