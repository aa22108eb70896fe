# SPDX-License-Identifier: Apache-2.0
"""One file per case; each has run(context) -> list of Row."""
