// SPDX-License-Identifier: Apache-2.0
#include "core/records/records.h"

#include <charconv>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/model/side_blob.h"
#include "core/records/record_text.h"

namespace ckptfs {

using nlohmann::json;

namespace {

constexpr std::string_view kRetired = ".deleted";

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

std::string RetiredName(const StepName& name) { return StrCat(StepRecordName(name), kRetired); }

std::optional<StepName> ParseRetiredName(std::string_view name) {
  if (!name.ends_with(kRetired)) return std::nullopt;
  return ParseStepName(name.substr(0, name.size() - kRetired.size()), "steps");
}

std::string ClaimName(const std::string& run, uint64_t n) { return StrCat("runs/", run, "/", n); }

std::string ManifestName(const Digest& digest) { return StrCat("manifests/", digest.Hex()); }

Result<StepRecord> ParseStepRecord(std::string_view bytes, const StepName& name) {
  CKPT_ASSIGN_OR_RETURN(const json object, UnsealRecord(bytes));
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
    return Fail(DamagedRecord("a step must have manifest, source, root, iteration and mtime_ns"));
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
      return Fail(
          DamagedRecord("a side blob must have a digest, and its step that of its "
                        "unpacked manifest"));
    }
  }
  if (const auto replaces = TextOf(object, "replaces")) record.replaces = DigestFromHex(*replaces);
  record.iteration = iteration->get<uint64_t>();
  record.mtime_ns = mtime->get<int64_t>();
  const auto converted = object.find("converted");
  record.converted = converted != object.end() && converted->is_boolean() && converted->get<bool>();
  if (const auto life = object.find("life"); life != object.end()) {
    if (!life->is_number_unsigned() || life->get<uint64_t>() > UINT32_MAX) {
      return Fail(DamagedRecord("a step's life must be a number of 32 bits"));
    }
    record.life = life->get<uint32_t>();
  }
  const auto provisional = object.find("provisional");
  record.provisional =
      provisional != object.end() && provisional->is_boolean() && provisional->get<bool>();
  const auto compacted = object.find("compacted");
  record.compacted = compacted != object.end() && compacted->is_boolean() && compacted->get<bool>();
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
  json object{{"version", kRecordVersion},           {"manifest", record.manifest.Hex()},
              {"iteration", record.iteration},       {"mtime_ns", record.mtime_ns},
              {"source", EncodeText(record.source)}, {"root", EncodeText(record.root)}};
  if (record.converted) object["converted"] = true;
  if (record.provisional) object["provisional"] = true;
  if (record.compacted) object["compacted"] = true;
  if (record.side) object["side"] = record.side->Hex();
  if (record.side || record.unpacked != record.manifest) {
    object["unpacked"] = record.unpacked.Hex();
  }
  if (record.life != 0) object["life"] = record.life;
  if (record.replaces) object["replaces"] = record.replaces->Hex();
  return SealRecord(object);
}

Result<std::string> ParseText(std::string_view bytes, std::string_view key, int version) {
  CKPT_ASSIGN_OR_RETURN(const json object, UnsealRecord(bytes, version));
  const auto value = TextOf(object, std::string(key).c_str());
  if (!value) return Fail(DamagedRecord(StrCat("no '", key, "'")));
  return *value;
}

std::string RenderText(std::string_view key, std::string_view value, int version) {
  return SealRecord(json{{"version", version}, {std::string(key), EncodeText(value)}});
}

}  // namespace ckptfs
