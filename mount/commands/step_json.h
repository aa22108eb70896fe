// SPDX-License-Identifier: Apache-2.0
//
// Steps as JSON and as text, the same in every command.
//
// Thread safety: pure functions; PrintJson writes to stdout.

#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "core/store/store.h"

namespace ckptfs {

nlohmann::json RecordJson(const StepRecord& record);

// Indented, with a newline; bytes that are no UTF-8 are replaced.
void PrintJson(const nlohmann::json& json);

// "2026-11-21 12:41:07" in local time.
std::string LocalTime(int64_t nanoseconds);

}  // namespace ckptfs
