"""Problems without clients and their solvers: completion, semidefinite programs, programs in any language."""
