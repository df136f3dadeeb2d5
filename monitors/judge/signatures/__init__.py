"""The classes as declared evidence. Read from the top: the first signature that fits is the verdict.

A signature *needs* one finding of each of its groups, does not fit when a finding of *unless* is there, and is made
more or less sure by what it *supports* and *against* name. Findings are facts about a scene (``findings.py``); what
they mean together is said here and nowhere else.

Three rules carry most of it. The majority's stack is the scene, the rank that stands elsewhere is the suspect. An odd
rank at another collective, in receive or idle is a desync; one that is busy on the host while the others wait is an
asymmetric hang or a host callback. Ranks that differ in their black boxes while a grammar-masked verify is among the
last batches are at the grammar barrier because of it; without a grammar they are out of step.
"""

from __future__ import annotations

from monitors.judge.signatures.calm import CALM
from monitors.judge.signatures.failures import FAILURES
from monitors.judge.signatures.signature import Signature
from monitors.judge.signatures.wedges import WEDGES

__all__ = ["SIGNATURES", "Signature"]

SIGNATURES: tuple[Signature, ...] = (*FAILURES, *WEDGES, *CALM)
