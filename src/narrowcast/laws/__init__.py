"""Laws that the classes of each registry keep: run by `narrowcast check` on anybody's class, and by the tests."""
