// SPDX-License-Identifier: Apache-2.0
#include "core/records/record_text.h"

#include <charconv>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

std::string Hex64(uint64_t value) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) text[i] = kDigits[value & 15];
  return text;
}

std::optional<uint64_t> FromHex64(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (text.size() != 16 || error != std::errc() || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return value;
}

}  // namespace

std::string EncodeText(std::string_view raw) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string text;
  for (char letter : raw) {
    const auto byte = static_cast<unsigned char>(letter);
    if (byte > 0x20 && byte < 0x7f && byte != '%') {
      text += letter;
    } else {
      text += {'%', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return text;
}

std::optional<std::string> DecodeText(std::string_view text) {
  std::string raw;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      raw += text[i];
      continue;
    }
    uint8_t byte = 0;
    const char* begin = text.data() + i + 1;
    if (text.size() - i < 3 || std::from_chars(begin, begin + 2, byte, 16).ptr != begin + 2) {
      return std::nullopt;
    }
    raw += static_cast<char>(byte);
    i += 2;
  }
  return raw;
}

std::string SealRecord(const nlohmann::json& object) {
  std::string line = object.dump();  // ASCII only: every text is percent-encoded
  const std::string check = Hex64(HashOf(line));
  return StrCat(line, "\n", check, "\n");
}

Error DamagedRecord(std::string_view rule) {
  return Error{ErrorCode::kDataLoss, StrCat("record: ", rule)};
}

Result<nlohmann::json> UnsealRecord(std::string_view bytes, int expected) {
  const size_t line_end = bytes.find('\n');
  if (line_end == std::string_view::npos || bytes.size() != line_end + 18 || bytes.back() != '\n') {
    return Fail(DamagedRecord("it is not a line followed by its checksum"));
  }
  const std::string_view line = bytes.substr(0, line_end);
  if (Hex64(HashOf(line)) != bytes.substr(line_end + 1, 16)) {
    return Fail(DamagedRecord("its bytes fail their checksum"));
  }
  nlohmann::json object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return Fail(DamagedRecord("not a JSON object"));
  const auto version = object.find("version");
  if (version == object.end() || !version->is_number_unsigned()) {
    return Fail(DamagedRecord("no version"));
  }
  if (version->get<uint64_t>() != static_cast<uint64_t>(expected)) {
    return Fail(ErrorCode::kUnsupported, StrCat("record: version ", version->get<uint64_t>(),
                                                ", but this build reads ", expected));
  }
  return object;
}

std::optional<std::string> TextOf(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return std::nullopt;
  return DecodeText(found->get_ref<const std::string&>());
}

std::optional<Digest> DigestFromHex(std::string_view text) {
  if (text.size() != 32) return std::nullopt;
  const auto high = FromHex64(text.substr(0, 16));
  const auto low = FromHex64(text.substr(16));
  if (!high || !low) return std::nullopt;
  return Digest{*high, *low};
}

}  // namespace ckptfs
