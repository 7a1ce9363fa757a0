"""What a world did, as text: one line per move, for scenario tests and for people.

    0.003 C: consumer t --peer_met--> registering
    0.104 C: told vLLM that c1 has its KV
    0.104 P: ignored done_of_unknown_load t
    0.105 * notice lost (Done t, P-1-pp0.tp0 to C-1)

Lines with a star tell what was done to the world, if the world tells (`World.tells`).
The name is the worker's, without its incarnation and rank when the engine has only one.
"""

from collections.abc import Iterable

from kvflow.core import effects as ef
from kvflow.ids import AgentName
from kvflow.testing.world import World

TOLD = ("producer", "consumer")


def transcript(
    world: World, machines: Iterable[str] = TOLD, since: float = 0.0, forgetting: bool = False
) -> str:
    """Lines of the machines asked for, from `since` on; without forgetting, unless asked for."""
    shown = set(machines)
    lines = []
    for at, agent, effect in world.log:
        if at < since:
            continue
        if isinstance(effect, str):
            lines.append(f"{at:.3f} * {effect}")
        elif line := _line(effect, shown, forgetting):
            lines.append(f"{at:.3f} {_short(world, agent)}: {line}")
    return "\n".join(lines)


def _short(world: World, agent: AgentName) -> str:
    """`P-1-pp0.tp0` is `P`, or `P.0` when there is a second rank; later starts keep a number."""
    name, start, *rank = agent.split("-")
    of = next((p for p in world.producers.values() if p.name == name), None)
    text = name if start == "1" else f"{name}#{start}"
    return f"{text}.{rank[0].rpartition('tp')[2]}" if of and len(of.ranks) > 1 else text


def _line(effect: object, shown: set[str], forgetting: bool) -> str:
    match effect:
        case ef.Moved() if effect.machine in shown:
            if effect.dest == "forgotten" and not forgetting:
                return ""
            why = f" ({effect.reason})" if effect.reason else ""
            return f"{effect.machine} {effect.key} --{effect.trigger}--> {effect.dest}{why}"
        case ef.Ignored():
            return f"ignored {effect.kind} {effect.key}"
        case ef.ReportSent():
            return f"told vLLM that {effect.request_id} may be freed"
        case ef.ReportReceived(reason=None):
            return f"told vLLM that {effect.request_id} has its KV"
        case ef.ReportReceived():
            return f"told vLLM that {effect.request_id} failed ({effect.reason})"
    return ""


def check(world: World, expected: str, **options: object) -> None:
    """Compare a transcript with lines that may be indented."""
    wanted = [line.strip() for line in expected.strip().splitlines()]
    got = transcript(world, **options).splitlines()  # type: ignore[arg-type]
    assert got == wanted, "\n".join(["the transcript is:", *got])
