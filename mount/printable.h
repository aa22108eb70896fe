// SPDX-License-Identifier: Apache-2.0
//
// Printable of core/base, where the commands look for it.
//
// Thread safety: pure function.

#pragma once

#include "core/base/printable.h"
