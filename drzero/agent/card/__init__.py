"""The model card of a bundle, and the figures in it. Nothing in a card is made up."""
