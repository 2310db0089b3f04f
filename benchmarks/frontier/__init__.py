"""The published Frontier ViT study, predicted from a handful of constants."""
