"""q-FFL and AFL: accuracy over clients."""
