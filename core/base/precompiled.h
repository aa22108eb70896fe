// SPDX-License-Identifier: Apache-2.0
//
// The headers that most sources include, compiled once for all (CMakeLists.txt).  Headers of
// the language and of libraries only: what is ours changes too often.  Sources
// include what they use all the same; `tests/run --tidy` compiles without this.
//
// Thread safety: none needed.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/expected.h"
