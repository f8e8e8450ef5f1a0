"""Networks: backbones, the classifier, the inference nets."""
