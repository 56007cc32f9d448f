"""Models of the Hugging Face hub, through `huggingface_hub` and its own cache.

`HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE` mean what they mean to that library, which also resumes cut
downloads and lets concurrent processes fetch the same file once.
"""

import logging
import os
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

logger = logging.getLogger(__name__)

# What an engine reads: configuration, weights, tokenizer and chat template; nothing of other frameworks.
_CONFIG_PATTERNS = ["config.json", "generation_config.json"]
_TOKENIZER_PATTERNS = ["*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt"]
_WEIGHTS_PATTERN = "*.safetensors"
_IGNORED = ["*/*", "consolidated*"]  # subdirectories, and second copies of the weights in other names
_DOWNLOAD_ATTEMPTS = 4
# The base error of the HTTP client that huggingface_hub uses and does not export: httpx, or its successor in 2.x.
_CLIENT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]


def fetch_repo(repo_id: str, revision: str | None, *, weights: bool = True, tokenizer: bool = True) -> Path:
    """Download a model repository's needed files, or find them in the cache. Returns the snapshot's directory.

    weights: False leaves the weight files out. tokenizer: False all but the configuration as well.

    Raises:
        ValueError: with what to do about it: no access (401, 403), no such repository or revision (404), offline
            without a cached copy, no connection.
    """
    where = f"{repo_id!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        patterns = [*_CONFIG_PATTERNS, *(_TOKENIZER_PATTERNS if tokenizer else ())]
        return _snapshot(repo_id, revision, [*patterns, _WEIGHTS_PATTERN] if weights else patterns)
    except GatedRepoError as error:
        raise ValueError(
            f"access to {repo_id!r} is restricted (HTTP {_status(error)}): accept its terms on "
            f"{constants.ENDPOINT}/{repo_id} and set HF_TOKEN to a token of that account"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"revision: {repo_id!r} has no branch, tag or commit {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{repo_id!r} was not found on {constants.ENDPOINT} (HTTP {_status(error)}), and there is no local "
            f"directory {os.path.abspath(repo_id)}. If the repository is private, set HF_TOKEN to a token with access"
        ) from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ValueError(
                f"{where} is not in the cache {constants.HF_HUB_CACHE} and HF_HUB_OFFLINE is set: download it once "
                "with HF_HUB_OFFLINE unset, or give a local directory"
            ) from error
        raise ValueError(
            f"{where} could not be downloaded from {constants.ENDPOINT} and is not in the cache "
            f"{constants.HF_HUB_CACHE}: {_root_cause(error)}. Check the network, HF_ENDPOINT and proxy settings"
        ) from error
    except HfHubHTTPError as error:
        status = _status(error)
        if status in (401, 403):
            raise ValueError(
                f"{constants.ENDPOINT} refused access to {where} (HTTP {status}): set HF_TOKEN to a valid token with "
                "access to it"
            ) from error
        raise ValueError(f"{constants.ENDPOINT} failed for {where} (HTTP {status}): {error}") from error
    except _CLIENT_ERROR as error:
        raise ValueError(
            f"the connection to {constants.ENDPOINT} broke {_DOWNLOAD_ATTEMPTS} times while {where} was downloaded "
            f"({error}); finished files are kept, so starting again goes on with the next"
        ) from error
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is neither a local directory nor a Hugging Face model id: {error}") from error
    except OSError as error:
        raise ValueError(f"{where} could not be stored in {constants.HF_HUB_CACHE}: {error}") from error


def _snapshot(repo_id: str, revision: str | None, patterns: list[str]) -> Path:
    """Try again after a break the library does not resume from itself; finished files are not fetched twice."""
    for attempt in range(1, _DOWNLOAD_ATTEMPTS + 1):
        try:
            return Path(
                snapshot_download(repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED)
            )
        except _CLIENT_ERROR as error:
            if isinstance(error, HfHubHTTPError) or attempt == _DOWNLOAD_ATTEMPTS:
                raise
            logger.warning("the connection broke while %s was downloaded (%s); resuming", repo_id, error)
    raise AssertionError("the last attempt returns or raises")


def _status(error: HfHubHTTPError) -> int | str:
    return error.response.status_code if error.response is not None else "unknown"


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__
