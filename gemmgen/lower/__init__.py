"""From a `Signature` and a `GemmConfig` to the text of a skeleton: one module a template family."""
