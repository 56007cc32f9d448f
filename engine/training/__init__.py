"""Training of DFlash drafters: prompts, the target's own responses, the drafter's fit, its acceptance. See README.md."""
