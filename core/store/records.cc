// SPDX-License-Identifier: Apache-2.0
#include "core/store/records.h"

#include <charconv>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/model/side_blob.h"

namespace ckptfs {
namespace {

using nlohmann::json;

constexpr int kVersion = 1;

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

std::string Encode(std::string_view raw) {
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

std::optional<std::string> Decode(std::string_view text) {
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

std::string Seal(const json& object) {
  std::string line = object.dump();  // ASCII only: every text is percent-encoded
  const std::string check = Hex64(HashOf(line));
  return StrCat(line, "\n", check, "\n");
}

Error Damaged(std::string_view rule) {
  return Error{ErrorCode::kDataLoss, StrCat("record: ", rule)};
}

Result<json> Unseal(std::string_view bytes) {
  const size_t line_end = bytes.find('\n');
  if (line_end == std::string_view::npos || bytes.size() != line_end + 18 || bytes.back() != '\n') {
    return Fail(Damaged("not a line and its checksum"));
  }
  const std::string_view line = bytes.substr(0, line_end);
  if (Hex64(HashOf(line)) != bytes.substr(line_end + 1, 16)) {
    return Fail(Damaged("its bytes fail their checksum"));
  }
  json object = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return Fail(Damaged("not a JSON object"));
  const auto version = object.find("version");
  if (version == object.end() || !version->is_number_unsigned()) {
    return Fail(Damaged("no version"));
  }
  if (version->get<uint64_t>() != kVersion) {
    return Fail(ErrorCode::kUnsupported,
                StrCat("record: version ", version->get<uint64_t>(), ", this build reads 1"));
  }
  return object;
}

std::optional<std::string> TextOf(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return std::nullopt;
  return Decode(found->get_ref<const std::string&>());
}

std::optional<Digest> DigestFromHex(std::string_view text) {
  if (text.size() != 32) return std::nullopt;
  const auto high = FromHex64(text.substr(0, 16));
  const auto low = FromHex64(text.substr(16));
  if (!high || !low) return std::nullopt;
  return Digest{*high, *low};
}

}  // namespace

std::optional<Digest> DigestNamed(std::string_view name) {
  const auto digest = DigestFromHex(name);
  // One spelling: no upper case, no sign.
  return digest && digest->Hex() == name ? digest : std::nullopt;
}

std::optional<StepName> ParseStepName(std::string_view name, std::string_view folder) {
  if (!name.starts_with(folder) || name.size() <= folder.size() || name[folder.size()] != '/') {
    return std::nullopt;
  }
  name.remove_prefix(folder.size() + 1);
  const size_t first = name.find('/');
  const size_t last = name.rfind('/');
  if (first == std::string_view::npos || first == last) return std::nullopt;
  StepName parsed{std::string(name.substr(0, first)),
                  std::string(name.substr(first + 1, last - first - 1)), 0};
  const std::string_view number = name.substr(last + 1);
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), parsed.n);
  if (error != std::errc() || end != number.data() + number.size() ||
      std::to_string(parsed.n) != number || parsed.n == UINT64_MAX) {
    return std::nullopt;
  }
  if (!CheckName(parsed.run, "run") || !CheckName(parsed.id, "step")) return std::nullopt;
  return parsed;
}

std::string StepRecordName(const StepName& name) {
  return StrCat("steps/", name.run, "/", name.id, "/", name.n);
}

std::string DeletedName(const StepName& name) {
  return StrCat("deleted/", name.run, "/", name.id, "/", name.n);
}

std::string ClaimName(const std::string& run, uint64_t n) { return StrCat("runs/", run, "/", n); }

std::string ManifestName(const Digest& digest) { return StrCat("manifests/", digest.Hex()); }

Result<StepRecord> ParseStepRecord(std::string_view bytes, const StepName& name) {
  CKPT_ASSIGN_OR_RETURN(const json object, Unseal(bytes));
  StepRecord record;
  record.run = name.run;
  record.id = name.id;
  const auto manifest = TextOf(object, "manifest");
  const auto digest = manifest ? DigestFromHex(*manifest) : std::nullopt;
  const auto source = TextOf(object, "source");
  const auto root = TextOf(object, "root");
  const auto iteration = object.find("iteration");
  const auto mtime = object.find("mtime_ns");
  if (!digest || !source || !root || iteration == object.end() ||
      !iteration->is_number_unsigned() || mtime == object.end() || !mtime->is_number_integer()) {
    return Fail(Damaged("a step has manifest, source, root, iteration and mtime_ns"));
  }
  record.manifest = *digest;
  record.source = *source;
  record.root = *root;
  record.unpacked = record.manifest;
  const auto unpacked = DigestFromHex(TextOf(object, "unpacked").value_or(""));
  if (unpacked) record.unpacked = *unpacked;
  if (const auto side = TextOf(object, "side")) {
    record.side = DigestFromHex(*side);
    if (!record.side || !unpacked) {
      return Fail(Damaged("a side blob has a digest, and its step an unpacked one"));
    }
  }
  if (const auto replaces = TextOf(object, "replaces")) record.replaces = DigestFromHex(*replaces);
  record.iteration = iteration->get<uint64_t>();
  record.mtime_ns = mtime->get<int64_t>();
  const auto converted = object.find("converted");
  record.converted = converted != object.end() && converted->is_boolean() && converted->get<bool>();
  return record;
}

std::string AttemptId(std::string_view id, int attempt) {
  return attempt == 0 ? std::string(id) : StrCat(id, "-", attempt);
}

StepRecord RecordOf(std::string_view run, const StepModel& model, const RenderedStep& rendered,
                    const std::string& source, const std::string& root) {
  StepRecord record;
  record.run = run;
  record.id = model.id;
  record.manifest = rendered.manifest;
  record.iteration = model.iteration;
  record.mtime_ns = model.mtime_ns;
  record.source = source;
  record.root = root;
  record.unpacked = rendered.unpacked;
  if (const auto side = FindSideBlob(model)) record.side = model.blob(*side).content;
  return record;
}

std::string RenderStepRecord(const StepRecord& record) {
  json object{{"version", kVersion},
              {"manifest", record.manifest.Hex()},
              {"iteration", record.iteration},
              {"mtime_ns", record.mtime_ns},
              {"source", Encode(record.source)},
              {"root", Encode(record.root)}};
  if (record.converted) object["converted"] = true;
  if (record.side) object["side"] = record.side->Hex();
  if (record.side || record.unpacked != record.manifest) {
    object["unpacked"] = record.unpacked.Hex();
  }
  if (record.replaces) object["replaces"] = record.replaces->Hex();
  return Seal(object);
}

Result<std::string> ParseText(std::string_view bytes, std::string_view key) {
  CKPT_ASSIGN_OR_RETURN(const json object, Unseal(bytes));
  const auto value = TextOf(object, std::string(key).c_str());
  if (!value) return Fail(Damaged(StrCat("no '", key, "'")));
  return *value;
}

std::string RenderText(std::string_view key, std::string_view value) {
  return Seal(json{{"version", kVersion}, {std::string(key), Encode(value)}});
}

}  // namespace ckptfs
