"""The built-in slime-style trainer: `python -m trainer_hooks.trainer --rollout-backend megatron`."""
