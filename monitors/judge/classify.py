"""From a scene to a verdict: find, match the signatures in order, say what speaks for, against, and what is missing."""

from __future__ import annotations

from monitors.judge import collectives
from monitors.judge.finding import Finding, Findings
from monitors.judge.findings import find
from monitors.judge.scene import Missing, Scene
from monitors.judge.signatures import SIGNATURES, Signature
from monitors.judge.verdict import Class, Evidence, Verdict

_EACH_SUPPORT = 0.05
_MOST_SUPPORT = 0.3  # signals of one stall go together: many of them are not many times the evidence
_EACH_AGAINST = 0.15
_SURE = 0.97
_KERNEL = Missing("the kernel on the device", "neither a stack nor a black box names it; the verdict does not claim one")
_ON_DEVICE = frozenset({Class.hang_grammar_barrier, Class.hang_symmetric_spin, Class.hang_asymmetric, Class.hang_tp_desync})


def classify(scene: Scene) -> Verdict:
    """The verdict on a scene. Never raises for want of evidence: then it is ``hang_unknown`` with low confidence."""
    found = find(scene)
    fitting = [signature for signature in SIGNATURES if _fits(signature, found)]
    if not fitting:
        return Verdict(
            Class.hang_unknown,
            0.1,
            (),
            (
                Missing("a signal", "nothing in the evidence says whether work is held or moves"),
                Missing("what would decide", "token counters twice, a completion with a nonce, and stacks of every rank"),
                *scene.missing,
                *collectives.missing(scene),
            ),
        )
    best = fitting[0]
    supporting = _named(found, [name for group in best.needs for name in group] + list(best.supports))
    opposing = _named(found, best.against)
    extra = len(supporting) - len(best.needs)
    confidence = max(0.1, min(_SURE, best.base + _MOST_SUPPORT, best.base + _EACH_SUPPORT * extra - _EACH_AGAINST * len(opposing)))
    evidence = [Evidence(f.text, f.cite) for f in supporting] + [Evidence(f.text, f.cite, supports=False) for f in opposing]
    if best.verdict.is_hang and "groups" in found:
        evidence.append(Evidence(found["groups"].text, found["groups"].cite))
    rival = next((s for s in fitting[1:] if s.verdict is not best.verdict and s.base >= 0.5), None)
    if rival is not None:
        key = next(name for name in rival.needs[0] if name in found)
        evidence.append(
            Evidence(f"this also fits {rival.verdict.value}: {found[key].text.partition(chr(10))[0]}", found[key].cite, supports=False)
        )
    return Verdict(best.verdict, confidence, tuple(evidence), _missing(scene, best, confidence), _suspects(best, found), best.blind)


def _fits(signature: Signature, found: Findings) -> bool:
    return all(any(name in found for name in group) for group in signature.needs) and not any(name in found for name in signature.unless)


def _named(found: Findings, names: list[str] | tuple[str, ...]) -> list[Finding]:
    """The findings of these names, each once, in the order of the names."""
    return [found[name] for name in dict.fromkeys(names) if name in found]


def _suspects(signature: Signature, found: Findings) -> tuple[str, ...]:
    """Whom the needed findings point at; the supporting ones only where those point at nobody."""
    for names in ([name for group in signature.needs for name in group], signature.supports):
        people = [f"{rank.name()}: {rank.text}" for name in names if name in found for rank in found[name].ranks]
        if people:
            return tuple(dict.fromkeys(people))
    return (found["stopped"].text,) if "stopped" in found and signature.verdict is Class.hang_stopped else ()


def _missing(scene: Scene, signature: Signature, confidence: float) -> tuple[Missing, ...]:
    gaps = [*scene.missing, *collectives.missing(scene)]
    if signature.verdict in _ON_DEVICE:
        gaps.append(_KERNEL)
    if signature.decides and confidence < 0.8:
        gaps.append(Missing("what would decide", signature.decides))
    for log in scene.logs:
        for traceback in log.tracebacks[-1:]:
            if not traceback.kind:
                gaps.append(
                    Missing(
                        "the exception's type and message", f"{log.artefact} is cut off inside the traceback at line {traceback.cite.line}"
                    )
                )
    return tuple(gaps)
