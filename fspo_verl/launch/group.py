# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How the config group of this package is selected without a plus, and alone.

Hydra is imported only where it is asked: each process that imports verl imports this module.
"""

from collections.abc import Callable, Sequence

from fspo_verl.keys import GROUP
from fspo_verl.launch.hydra_files import leaves, parsed, task_overrides


def with_plus(create: Callable, *, overrides_list: list, repo, **how):
    """Around Hydra's ``create_defaults_list``: an option of the group is added where there is none to be replaced.

    Hydra asks for a plus there. Composing calls that function, and so does ``--info``.

    Raises:
        ConfigCompositionException: what Hydra refuses; with a fix where it is about the group.
    """
    from hydra.errors import ConfigCompositionException, MissingConfigException

    words = [one for one in overrides_list if one.key_or_group == GROUP and not one.is_sweep_override()]
    fix = as_fix(*select_alone(words))
    try:
        return _listed(lambda given: create(overrides_list=given, repo=repo, **how), overrides_list, words, repo)
    except MissingConfigException:
        raise
    except (ConfigCompositionException, ValueError) as error:  # a ValueError where the value is no name
        if not fix:
            raise
        raise ConfigCompositionException(f"{error}; {fix}") from error


def _listed(create: Callable, overrides: list, words: list, repo):
    """The defaults list of Hydra's ``create(overrides)``; the last of ``words`` without a plus gets one if needed."""
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import ConfigCompositionException

    plain = [one for one in words if one.type == OverrideType.CHANGE and one.package is None]
    try:
        return create(overrides)
    except ConfigCompositionException as error:
        if not plain or f"Could not override '{GROUP}'" not in str(error):
            raise
    stock = create([one for one in overrides if one.key_or_group != GROUP])
    files = filter(None, (repo.load_config(default.config_path) for default in stock.defaults))
    has_key = any(f"{key}.".startswith(f"{GROUP}.") for file in files for key in leaves(file.config))
    if has_key and all(one.package is None for one in words):
        stock.config_overrides.extend(words)  # the key is the user's own: Hydra sets it, as without this package
        return stock
    *earlier, last = plain
    for one in earlier:
        overrides.remove(one)
    # In place: Hydra records what it was given, and a process without this wrap has to compose the same from it.
    last.type, last.input_line = OverrideType.ADD, f"+{last.input_line}"
    return create(overrides)


# --- fixes -----------------------------------------------------------------------------------------------------------


def select_alone(words: Sequence, keep_plus: bool = False) -> tuple[list[str], list[str]]:
    """Overrides to remove, and to add, for the last option that these parsed ones name to be selected alone.

    With ``keep_plus`` ``+GROUP=OPTION`` stays, too.
    """
    names = (one for one in reversed(words) if not one.is_delete() and isinstance(one.value(), str | list))
    last = next(names, None)
    wanted = last and f"{GROUP}={last.get_value_string()}"
    stay = {wanted, f"+{wanted}"} if keep_plus else {wanted}
    removed = [one.input_line for one in words if one.input_line not in stay]
    return removed, [wanted] if wanted and len(removed) == len(words) else []


def overrides_that_decide(key: str, than: object = ...) -> list[str]:
    """The overrides of the running Hydra application that take out a key, or set it to another value ``than`` this."""
    found = []
    for one in parsed(task_overrides()):
        value = None if one.is_delete() else one.value()
        sets = {} if one.is_delete() else leaves({one.key_or_group: value})
        takes_out = f"{key}.".startswith(f"{one.key_or_group}.") and not isinstance(value, dict)
        if (sets[key] != than) if key in sets else takes_out:
            found.append(one.input_line)
    return found


def as_fix(removed: Sequence[str], added: Sequence[str]) -> str:
    """Overrides to remove and to add, as a sentence."""
    removal, addition = f"remove {' '.join(removed)}", " ".join(added)
    return f"{removal}, and add {addition}" if removed and added else removal if removed else addition
