"""Several drafters, one tree (SpecInfer's merge-based trees): same path, same node.

Each drafter's draws keep the law that they were drawn from, so a token that two drafters propose is one node with two trials,
tried in the order of the drafters.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.base import Drafter, DrafterTeam, DraftState, DraftStateTeam
from outrider.sampling import Sampler
from outrider.tree import Shape, TokenTree
from outrider.verify import Draft, Trial, Verdict


class MergedDrafter(DrafterTeam):
    """Proposes the union of what its drafters propose."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        self.name = "+".join(drafter.name for drafter in drafters)

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> MergedDraftState:
        """Begin all drafters, each with a random stream of its own."""
        states = self.begin_all(prompts, samplers, room, stream)
        return MergedDraftState(states)


class MergedDraftState(DraftStateTeam):
    """The drafters' sides of B sequences, and how their nodes map to the merged ones."""

    def __init__(self, states: Sequence[DraftState]) -> None:
        super().__init__(states)
        self.proposals: list[list[Draft]] = []
        self.merged: list[Draft] = []

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """One merged tree per row."""
        self.proposals = [state.propose(contexts, shapes) for state in self.states]
        self.merged = [merge([drafts[row] for drafts in self.proposals]) for row in range(len(contexts))]
        return self.merged

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Tell each drafter how far its own tree was followed."""
        for state, drafts in zip(self.states, self.proposals):
            state.observe([verdict_on(d.tree, m.tree, v) for d, m, v in zip(drafts, self.merged, verdicts)])


def merge(drafts: Sequence[Draft]) -> Draft:
    """The union of trees with one root; trials of earlier drafts come first."""
    tree = TokenTree(drafts[0].tree.root)
    trials: dict[int, list[Trial]] = {}
    for draft in drafts:
        place = {0: 0}
        for node in range(1, len(draft.tree)):
            place[node] = tree.add_once(place[draft.tree.parents[node]], draft.tree.tokens[node])
        for parent, tried in draft.trials.items():
            trials.setdefault(place[parent], []).extend(Trial(place[t.node], t.law) for t in tried)
    return Draft(tree, trials)


def verdict_on(own: TokenTree, merged: TokenTree, verdict: Verdict) -> Verdict:
    """A verdict on the merged tree in the nodes of one drafter's tree."""
    path = [0]
    for node in verdict.path[1:]:
        child = own.child(path[-1], merged.tokens[node])
        if child is None:
            break
        path.append(child)
    return Verdict(path, verdict.next_token)
