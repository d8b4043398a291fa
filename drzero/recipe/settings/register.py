"""The defaults of our settings in Hydra's ConfigStore, as structured configs.

register()      # config/*.yaml may then begin with `settings/STAGE`
"""

import dataclasses

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from drzero.recipe.settings.schema import OWN, SHARED_WITH_VERL
from drzero.recipe.settings.stages import Common


def register() -> None:
    """Store the defaults as typed groups under an open root, where veRL's nodes join them."""
    store = ConfigStore.instance()
    for name, cls in {"common": Common, **OWN}.items():
        if cls is None:
            continue
        structured = OmegaConf.structured(cls)
        nodes = {field.name: structured._get_node(field.name) for field in dataclasses.fields(cls)}
        if SHARED_WITH_VERL in nodes:
            nodes[SHARED_WITH_VERL] = OmegaConf.to_container(nodes[SHARED_WITH_VERL])
        store.store(group="settings", name=name, node=OmegaConf.create(nodes), package="_global_")
