"""The error classes: every message says what is wrong, where, and what to do."""

import inspect

from connectors import errors


def test_every_error_is_ours() -> None:
    """One base class, so that a caller can catch all of them, and a docstring for each."""
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    assert len(classes) >= 9
    for kind in classes:
        assert issubclass(kind, errors.TandemError)
        assert kind.__doc__


def test_a_broken_cover_is_a_broken_plan() -> None:
    """A handler of plan errors also handles failed proofs."""
    assert issubclass(errors.CoverError, errors.PlanError)


def test_incompatible_peers_read_well() -> None:
    """Field, both values, remedy; programs can read the field."""
    error = errors.IncompatiblePeerError("dtype", "bfloat16", "float16", "start both engines with the same dtype")
    assert str(error) == (
        "dtype differs: the decode engine has 'bfloat16', the prefill engine 'float16'; "
        "start both engines with the same dtype"
    )
    assert error.field == "dtype"


def test_unsupported_caches_read_well() -> None:
    """The message has layer, unsupported property and remedy."""
    error = errors.UnsupportedCacheError("layers.3.attn", "its cache is compressed", "serve it without Tandem")
    assert str(error) == "layer 'layers.3.attn': its cache is compressed; serve it without Tandem"
    assert error.layer == "layers.3.attn"


def test_transport_errors_name_the_peer() -> None:
    """The message begins with the name of the agent."""
    error = errors.TransportError("decode-1", "a write failed")
    assert str(error) == "agent 'decode-1': a write failed"
    assert error.peer == "decode-1"
