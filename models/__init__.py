"""Models of the field: single-device modules that know nothing of ranks. Imported as `hetsync.models`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hetsync.config.imports import call_with_options, import_object
from hetsync.data import Data
from hetsync.errors import UserError
from hetsync.models.steps import GoesBySteps

BUILT_IN = {
    "conv_lstm": "hetsync.models.conv_lstm:ConvLSTM",
    "dcrnn": "hetsync.models.dcrnn:DCRNN",
    "deeptte": "hetsync.models.deeptte:DeepTTE",
    "digits_cnn": "hetsync.models.digits_cnn:DigitsCNN",
    "graph_wavenet": "hetsync.models.graph_wavenet:GraphWaveNet",
    "inception_v3": "hetsync.models.inception:InceptionV3",
    "nasnet_a_cifar": "hetsync.models.nasnet:nasnet_a_cifar",
    "nasnet_a_large": "hetsync.models.nasnet:nasnet_a_large",
    "nasnet_a_mobile": "hetsync.models.nasnet:nasnet_a_mobile",
    "nmt": "hetsync.models.nmt:NMT",
    "pnasnet5_cifar": "hetsync.models.pnasnet:pnasnet5_cifar",
    "pnasnet5_large": "hetsync.models.pnasnet:pnasnet5_large",
    "pnasnet5_mobile": "hetsync.models.pnasnet:pnasnet5_mobile",
    "ptb_lstm": "hetsync.models.ptb_lstm:ptb_lstm",
    "resnet18": "hetsync.models.resnet:resnet18",
    "resnet50": "hetsync.models.resnet:resnet50",
    "trajectory_transformer": "hetsync.models.trajectory_transformer:TrajectoryTransformer",
    "transformer_lm": "hetsync.models.transformer_lm:TransformerLM",
}

COUNTED = frozenset({"classes", "vocabulary", "source_vocabulary", "target_vocabulary"})  # of data, by options' names
FIXED = frozenset({"sensors", "horizon"})  # which are as the data have them


def build_for(data: Data, name: str, options: Mapping[str, Any]) -> torch.nn.Module:
    """A model with a recipe's options, and with what else the data tells of itself (classes, vocabulary).

    UserError where the options do not fit the data: by a sample that has more it would fail.
    """
    make = _find(name)
    for key in COUNTED.intersection(data.model_options, options):
        given, there = options[key], data.model_options[key]
        if isinstance(given, int) and given < there:
            raise UserError(
                f"model.options.{key} is {given}, but the data has {there}: leave it out, or give {there} or more"
            )
    for key in FIXED.intersection(data.model_options, options):
        if options[key] != data.model_options[key]:
            raise UserError(
                f"model.options.{key} is {options[key]}, but the data has {data.model_options[key]}: leave it out"
            )
    known = inspect.signature(make).parameters
    return _build(name, make, options, {key: value for key, value in data.model_options.items() if key in known})


def going_by_steps(model: torch.nn.Module) -> list[GoesBySteps]:
    """Its parts whose `step_count` is to be set before each slice."""
    return [module for module in model.modules() if isinstance(module, GoesBySteps)]


def build(name: str, **options: Any) -> torch.nn.Module:
    """A model by its recipe name, or by the import path of a callable that returns one."""
    return _build(name, _find(name), options, {})


def _build(
    name: str, make: Callable[..., Any], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> torch.nn.Module:
    model = call_with_options("model", make, options, torch.nn.Module, defaults)
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"model.name is {name}, which returned {type(model).__name__}: return a torch.nn.Module")
    return model


def _find(name: str) -> Callable[..., Any]:
    if name not in BUILT_IN and ":" not in name:
        known = ", ".join(sorted(BUILT_IN))
        raise UserError(f"model.name is {name}: use one of {known}, or package.module:name for your own")
    found: Callable[..., Any] = import_object("model.name", BUILT_IN.get(name, name))
    return found
