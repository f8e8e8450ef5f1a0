"""vicinal: test-time domain generalization by variational neighbor labels."""
