"""One face for every recurrence: over a tree from one committed state, in any way, leaving factors by name.

A rule knows its own state, inputs and factors; whoever keeps them (`cache.factor_states`) knows none of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from outrider.mixers import gated_delta, linear, selective, ssd
from outrider.mixers.chains import Plan

Factors = Mapping[str, Tensor]
"""By name, [B, M, ...] of pending nodes, or [L, ...] of the nodes of a path. "k" [J, K] is what a node writes by, and "u" [H, V]
what it writes."""


class Rule(Protocol):
    """A recurrence. States come as they are kept, with B rows, Y known states, or none of both in front."""

    name: str

    def given(self, x: Any) -> Factors:
        """The factors of new nodes that are known before these are scored."""
        ...

    def masked(self, state_B: Tensor, x: Any, factors: Factors, seen_BMM: Tensor) -> tuple[Tensor, Factors]:
        """Outputs of the new nodes, all scored at once, and their other factors.

        Args:
            factors: of all pending nodes, the new ones last; what is not given is not known of these.
        """
        ...

    def chains(self, known_Y: Tensor, x: Any, plan: Plan) -> tuple[Tensor, Factors]:
        """The same, stepped in chains."""
        ...

    def after_(self, state: Tensor, factors: Factors) -> Tensor:
        """The state after a path, in place."""
        ...


class DeltaRule:
    """The gated delta rule with states [H, K, V]; takes `gated_delta.Inputs`.

    Args:
        maths: what computes it: `gated_delta`, or a twin of it.
    """

    def __init__(self, name: str, maths: Any = gated_delta) -> None:
        self.name, self.maths = name, maths

    def given(self, x: gated_delta.Inputs) -> Factors:
        """See `Rule`."""
        return {"k": x.k_BNJK, "g": x.g_BNHD}

    def masked(
        self, state_B: Tensor, x: gated_delta.Inputs, factors: Factors, seen_BMM: Tensor
    ) -> tuple[Tensor, Factors]:
        """See `Rule`."""
        held = linear.Factors(factors["k"], factors.get("u", x.v_BNHV), factors["g"])
        o_BNHV, u_BNHV = self.maths.masked(state_B, x, held, seen_BMM)
        return o_BNHV, {"u": u_BNHV}

    def chains(self, known_Y: Tensor, x: gated_delta.Inputs, plan: Plan) -> tuple[Tensor, Factors]:
        """See `Rule`."""
        o_BNHV, u_BNHV = self.maths.chains(known_Y, x, plan)
        return o_BNHV, {"u": u_BNHV}

    def after_(self, state: Tensor, factors: Factors) -> Tensor:
        """See `Rule`."""
        return linear.after_(state, factors["k"], factors["u"], factors["g"])


class DualityInputs(NamedTuple):
    """What `Duality` takes: what nodes read by, and their factors."""

    c_BNGS: Tensor
    new: linear.Factors


class Duality:
    """Mamba-2 with states [H, P, S], without its skip."""

    name = "mamba-2"

    def given(self, x: DualityInputs) -> Factors:
        """See `Rule`."""
        return {"k": x.new.k_BMJK, "u": x.new.u_BMHV, "g": x.new.g_BMHD}

    def masked(self, state_B: Tensor, x: DualityInputs, factors: Factors, seen_BMM: Tensor) -> tuple[Tensor, Factors]:
        """See `Rule`."""
        held = linear.Factors(factors["k"], factors["u"], factors["g"])
        return ssd.masked_groups(state_B, x.c_BNGS, held, seen_BMM), {}

    def chains(self, known_Y: Tensor, x: DualityInputs, plan: Plan) -> tuple[Tensor, Factors]:
        """See `Rule`."""
        return ssd.chains(known_Y, x.c_BNGS, x.new, plan), {}

    def after_(self, state: Tensor, factors: Factors) -> Tensor:
        """See `Rule`."""
        return ssd.after_groups_(state, factors["k"], factors["u"], factors["g"])


class SelectiveRule:
    """Mamba-1 with states [D, S] and the decay rates of one layer; takes `selective.Inputs`. Without its skip."""

    name = "mamba-1"

    def __init__(self, A_DS: Tensor) -> None:
        self.A_DS = A_DS

    def given(self, x: selective.Inputs) -> Factors:
        """See `Rule`."""
        dt, w, b = selective.factors(x)
        return {"k": b[:, :, None], "u": w[:, :, None], "dt": dt}

    def masked(
        self, state_B: Tensor, x: selective.Inputs, factors: Factors, seen_BMM: Tensor
    ) -> tuple[Tensor, Factors]:
        """See `Rule`."""
        return selective.masked(state_B, x.c_BNS, self._held(factors), self.A_DS, seen_BMM), {}

    def chains(self, known_Y: Tensor, x: selective.Inputs, plan: Plan) -> tuple[Tensor, Factors]:
        """See `Rule`."""
        return selective.chains(known_Y, x, self.A_DS, plan), {}

    def after_(self, state: Tensor, factors: Factors) -> Tensor:
        """See `Rule`."""
        return selective.after_(state, *self._held(factors), self.A_DS)

    def _held(self, factors: Factors) -> selective.Factors:
        return selective.Factors(factors["dt"], factors["u"][..., 0, :], factors["k"][..., 0, :])


DELTA, DELTA_PER_CHANNEL = DeltaRule("gated delta"), DeltaRule("gated delta per channel")
DUALITY = Duality()
NAMES = (DELTA.name, DELTA_PER_CHANNEL.name, DUALITY.name, SelectiveRule.name)
