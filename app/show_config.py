"""Print a Serve config file with every setting of `args`, defaults included: `tandem config`."""

import argparse
import sys

import yaml

from app.installation import EXAMPLE, config_file
from app.run import load, ours
from configs.settings.base import SettingsError
from configs.settings.service import ModelSettings


def main(argv: list[str] | None = None) -> int:
    """Return 2 if the file is invalid, else 0. Keys and secrets are printed as asterisks."""
    parser = argparse.ArgumentParser(prog="tandem config", description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=EXAMPLE, help="a Serve config file")
    parser.add_argument("--port", type=int, help="HTTP port; overrides the port in the config file")
    options = parser.parse_args(argv)
    try:
        config, settings = load(config_file(options.config), options.port)
    except SettingsError as error:
        print(f"{options.config}: {error}", file=sys.stderr)
        return 2
    in_models = set(ModelSettings.model_fields) if settings.models else set()
    ours(config)["args"] = settings.model_dump(mode="json", exclude=in_models)
    print(yaml.safe_dump(config, sort_keys=False), end="")
    return 0
