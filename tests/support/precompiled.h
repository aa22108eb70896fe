// SPDX-License-Identifier: Apache-2.0
//
// The headers that most tests include, compiled once for all of them (core/base/precompiled.h).
//
// Thread safety: none needed.

#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/precompiled.h"
