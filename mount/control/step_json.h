// SPDX-License-Identifier: Apache-2.0
//
// Steps as JSON and as text, the same in every command.
//
// Thread safety: pure functions; PrintJson writes to stdout.

#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/store/store.h"

namespace ckptfs {

nlohmann::json RecordJson(const StepRecord& record);

// {"code", "message", "layout", "parameter", "needs"}, the last three null where nothing is known.
nlohmann::json ErrorJson(const Error& error);

// Indented, with a newline; bytes that are not UTF-8 are replaced.
void PrintJson(const nlohmann::json& json);

// "2026-11-21 12:41:07" in local time.
std::string LocalTime(int64_t nanoseconds);

// Rows of columns that are as wide as their widest cell; the last one is not padded.  Columns
// with "r" in `align` (a letter a column) are aligned to the right.  The caller makes the
// cells printable.
void PrintColumns(const std::vector<std::vector<std::string>>& rows, std::string_view align = "");

// "5 min ago"; "in 3 s" for what clocks disagree about.
std::string Ago(int64_t nanoseconds);

}  // namespace ckptfs
