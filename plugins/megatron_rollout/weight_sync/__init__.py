"""How weights get from trainer cells into rollout cells: who takes part, in which order, over which transport."""
