"""The command line of lm_eval with the models of this package. lm_eval itself cannot find models of other packages.

python -m glassformer.evaluation --model glassformer --model_args pretrained=DIR --tasks NAME
"""

import sys

from glassformer.errors import install, missing

if __name__ == "__main__":
    if missing("eval"):
        sys.exit(f"lm_eval is not installed: {install('eval')}.")
    from lm_eval.__main__ import cli_evaluate

    import glassformer.evaluation.harness  # noqa: F401  registers the model

    cli_evaluate()
