// SPDX-License-Identifier: Apache-2.0
//
// The text of every record of a store:
//
//   record = JSON object, one line | "\n" | 16 hex letters, XXH3-64 of the line | "\n"
//
// Texts in one are percent-encoded, so that any bytes survive.
//
// Thread safety: pure functions.

#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/digest.h"
#include "core/base/result.h"

namespace ckptfs {

inline constexpr int kRecordVersion = 1;  // "version" of each

std::string EncodeText(std::string_view raw);
std::optional<std::string> DecodeText(std::string_view text);

// REQUIRES: the object has its version, and every text in it is encoded.
std::string SealRecord(const nlohmann::json& object);
// kDataLoss when the bytes are not what was sealed, kUnsupported for another version.
Result<nlohmann::json> UnsealRecord(std::string_view bytes, int version = kRecordVersion);
Error DamagedRecord(std::string_view rule);

// The decoded text under a key; nothing if there is none.
std::optional<std::string> TextOf(const nlohmann::json& object, const char* key);
// Reads a digest of 32 hexadecimal digits.
std::optional<Digest> DigestFromHex(std::string_view text);

}  // namespace ckptfs
