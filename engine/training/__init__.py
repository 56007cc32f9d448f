"""Training of DFlash drafters: prompts, the target's own responses, the fit, its acceptance. See README.md."""
