// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/capture.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/state/rank_file.h"
#include "snapshot/wire/arena.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

// kInvalid if a text is not UTF-8.
Result<std::string> EntryOf(const Capture& capture, const std::string& tensors, bool ordered,
                            const Json& kept, uint32_t rank, uint32_t world) {
  // Builds that know neither what is ordered nor what is kept elsewhere read all other files.
  const bool plain = !ordered && kept.empty();
  Json entry{{"version", plain ? kRankFileBefore : kRankFileVersion},
             {"rank", rank},
             {"world", world},
             {"step", capture.step},
             {"framework", capture.framework},
             {"framework_version", capture.framework_version}};
  if (!capture.layout.empty()) entry["layout"] = capture.layout;
  if (!capture.parameters.empty()) {
    Json& parameters = entry["parameters"] = Json::array();
    for (const CapturedParameter& parameter : capture.parameters) {
      parameters.push_back({{"name", parameter.name}, {"role", parameter.role}});
    }
    entry["aliases"] = Json::array();
    for (const auto& [alias, name] : capture.aliases) {
      entry["aliases"].push_back(Json::array({alias, name}));
    }
    entry["groups"] = Json::array();
    for (const CapturedGroup& group : capture.groups) {
      entry["groups"].push_back({{"optimizer", group.optimizer},
                                 {"parameters", group.parameters},
                                 {"pickle", group.pickle}});
    }
  }
  if (!kept.empty()) entry["kept"] = kept;
  Json& documents = entry["documents"] = Json::array();
  for (const CapturedDocument& document : capture.documents) {
    documents.push_back({{"key", document.key},
                         {"scope", document.scope},
                         {"pickle", document.pickle},
                         {"tensors", document.tensors}});
  }
  for (const auto& [digest, ranks] : capture.alike) {
    entry["alike"].push_back(Json::array({digest, ranks}));
  }
  try {
    return StrCat("{\"tensors\":{", tensors, "},", entry.dump().substr(1));
  } catch (const Json::exception&) {
    return Fail(ErrorCode::kInvalid, "snapshot: a name is not UTF-8");
  }
}

struct Placed {
  const PlannedTensor* tensor = nullptr;
  const std::byte* from = nullptr;
};

std::vector<Placed> PlacedOf(const CapturePlan& plan,
                             const std::vector<const std::byte*>& sources) {
  std::vector<Placed> placed;
  placed.reserve(plan.tensors().size());
  for (const PlannedTensor& tensor : plan.tensors()) {
    placed.push_back({&tensor, sources[tensor.given]});
  }
  return placed;
}

// Arranges both plans' tensors in the file's order; `sources`: the addresses of `rest`'s.
Result<std::vector<Placed>> Arranged(const Capture& capture, const CapturePlan& rest,
                                     const std::vector<const std::byte*>& sources) {
  std::vector<Placed> placed = PlacedOf(rest, sources);
  if (!capture.plan) return placed;
  if (capture.sources.size() != capture.plan->tensors().size()) {
    return Fail(ErrorCode::kInvalid, "snapshot: the plan is for other tensors");
  }
  for (const Placed& one : placed) {
    const std::string& key = one.tensor->entry.name;
    if (!capture.plan->Has(key)) continue;
    return Fail(ErrorCode::kInvalid, StrCat("snapshot: there are two tensors '", key, "'"));
  }
  std::vector<Placed> all = PlacedOf(*capture.plan, capture.sources);
  const auto middle = all.insert(all.end(), placed.begin(), placed.end());
  std::inplace_merge(all.begin(), middle, all.end(),
                     [](const Placed& a, const Placed& b) { return a.tensor->Before(*b.tensor); });
  return all;
}

bool MayBeKept(const Placed& one) {
  const SafetensorsEntry& entry = one.tensor->entry;
  const auto bytes = ByteCount(entry.shape, entry.dtype);
  return one.tensor->use != TensorUse::kPickle && one.tensor->device == kHost && bytes &&
         *bytes >= kLeastKept;
}

std::span<const std::byte> BytesOf(const Placed& one) {
  return {one.from, *ByteCount(one.tensor->entry.shape, one.tensor->entry.dtype)};
}

// Where durable saves have the tensors, by their addresses.  A file stays as long as one of its
// tensors is needed, so files of which less than a quarter would be used are left out.
std::map<const Placed*, std::string> KeptOf(const std::vector<Placed>& placed,
                                            const KeptTensors& known) {
  std::map<const Placed*, std::string> kept;
  std::map<std::string, uint64_t> used, sizes;  // by place
  for (const Placed& one : placed) {
    if (!MayBeKept(one)) continue;
    const auto place = known.Find(one.tensor->entry, BytesOf(one));
    if (!place) continue;
    used[place->directory] += BytesOf(one).size();
    sizes[place->directory] = place->file_bytes;
    kept[&one] = place->directory;
  }
  std::erase_if(kept, [&](const auto& one) { return used[one.second] < sizes[one.second] / 4; });
  return kept;
}

// Takes out the tensors that durable saves have; says where these are, by key.
Json TakeKept(std::vector<Placed>& placed, const KeptTensors& known) {
  Json kept = Json::object();
  std::vector<Placed> left;
  const std::map<const Placed*, std::string> places = KeptOf(placed, known);
  for (const Placed& one : placed) {
    const SafetensorsEntry& entry = one.tensor->entry;
    const auto place = places.find(&one);
    if (place == places.end()) {
      left.push_back(one);
      continue;
    }
    kept[entry.name] = {
        {"place", place->second}, {"dtype", SafetensorsName(entry.dtype)}, {"shape", entry.shape}};
  }
  placed = std::move(left);
  return kept;
}

// The tensors of a file whose digests the next save may ask for.
TensorDigests DigestsOf(const std::vector<Placed>& placed,
                        const std::vector<SafetensorsEntry>& entries, uint64_t data_offset,
                        const KeptTensors& known) {
  TensorDigests digests;
  for (size_t i = 0; i < placed.size(); ++i) {
    if (!MayBeKept(placed[i])) continue;
    TensorDigests::One one{entries[i], HeadOf(BytesOf(placed[i]))};
    one.entry.begin += data_offset;
    one.entry.end += data_offset;
    one.wanted = known.IsWanted(one.entry, one.head);
    digests.Add(std::move(one));
  }
  return digests;
}

// Returns what both plans say of their tensors.
std::string WordsOf(const CapturePlan* plan, const CapturePlan& rest) {
  if (plan == nullptr || plan->words().empty()) return rest.words();
  return StrCat(plan->words(), rest.words().empty() ? "" : ",", rest.words());
}

}  // namespace

Result<CaptureFile> CaptureFile::Make(Capture capture, uint32_t rank, uint32_t world,
                                      const KeptTensors* kept) {
  CaptureFile file;
  std::vector<const std::byte*> sources;
  for (const CapturedTensor& tensor : capture.tensors) sources.push_back(tensor.from);
  CKPT_ASSIGN_OR_RETURN(file.rest_, CapturePlan::Make(std::move(capture.tensors)));
  CKPT_ASSIGN_OR_RETURN(std::vector<Placed> placed, Arranged(capture, file.rest_, sources));
  const Json elsewhere = kept != nullptr ? TakeKept(placed, *kept) : Json::object();
  for (const auto& [key, place] : elsewhere.items()) file.kept_.insert(key);
  const CapturePlan* const plan = capture.plan.get();
  const bool ordered = file.rest_.ordered() || (plan != nullptr && plan->ordered());
  CKPT_ASSIGN_OR_RETURN(std::string entry, EntryOf(capture, WordsOf(plan, file.rest_), ordered,
                                                   elsewhere, rank, world));
  std::vector<SafetensorsEntry> entries;
  entries.reserve(placed.size());
  for (const Placed& one : placed) entries.push_back(one.tensor->entry);
  CKPT_ASSIGN_OR_RETURN(std::string header,
                        RenderSafetensorsHeader({{"format", "pt"},
                                                 {kRankFileKey, std::move(entry)},
                                                 {kUnprovedKey, std::string(kUnprovedDigits, '0')}},
                                                entries));
  file.header_ = std::make_shared<std::string>(std::move(header));
  if (kept != nullptr) file.digests_ = DigestsOf(placed, entries, file.header_->size(), *kept);
  const auto text = std::as_bytes(std::span(*file.header_));
  file.parts_.push_back({0, text.size(), text.data(), false});
  for (size_t i = 0; i < entries.size(); ++i) {
    const PlannedTensor& tensor = *placed[i].tensor;
    if (entries[i].end == entries[i].begin) continue;
    file.parts_.push_back({text.size() + entries[i].begin, text.size() + entries[i].end,
                           placed[i].from, tensor.lazy, tensor.device, &tensor.entry.name});
  }
  file.bytes_ = file.parts_.back().end;
  file.capture_ = std::move(capture);
  return file;
}

// No text within the header can be taken for it: there quotes have a backslash in front.
void CaptureFile::SayUnproved(uint64_t bytes) {
  const std::string before = StrCat("\"", kUnprovedKey, "\":\"");
  const size_t at = header_->find(before);
  const std::string digits = StrCat(bytes);
  CKPT_CHECK(at != std::string::npos && digits.size() <= kUnprovedDigits);
  header_->replace(at + before.size() + kUnprovedDigits - digits.size(), digits.size(), digits);
}

std::vector<CopyRun> CaptureFile::Runs(uint64_t begin, uint64_t end, bool lazy) const {
  std::vector<CopyRun> runs;
  auto part = std::upper_bound(parts_.begin(), parts_.end(), begin,
                               [](uint64_t at, const Part& p) { return at < p.end; });
  for (; part != parts_.end() && part->begin < end; ++part) {
    if (part->lazy != lazy) continue;
    const uint64_t from = std::max(begin, part->begin);
    const uint64_t to = std::min(end, part->end);
    runs.push_back({part->from + (from - part->begin), from, to - from, part->device});
  }
  return runs;
}

void CaptureFile::Narrow(const LatePart& late) {
  std::vector<Part> parts;
  parts.reserve(parts_.size());
  for (const Part& part : parts_) {
    const std::span whole(part.from, part.end - part.begin);
    const auto kept = part.lazy && part.device == kHost ? late(whole) : whole;
    const uint64_t before = static_cast<uint64_t>(kept.data() - whole.data());
    const uint64_t ends[] = {part.begin + before, part.begin + before + kept.size(), part.end};
    uint64_t begin = part.begin;
    for (const uint64_t end : ends) {
      if (begin == end) continue;
      Part one = part;
      one.begin = begin;
      one.end = end;
      one.from = part.from + (begin - part.begin);
      one.lazy = part.lazy && begin == ends[0] && end == ends[1];
      parts.push_back(one);
      begin = end;
    }
  }
  parts_ = std::move(parts);
}

std::string CaptureFile::KeyAt(uint64_t at) const {
  const auto part = std::upper_bound(parts_.begin(), parts_.end(), at,
                                     [](uint64_t byte, const Part& p) { return byte < p.end; });
  return part == parts_.end() || part->key == nullptr ? "" : *part->key;
}

Result<SnapshotSize> SizeOf(Capture capture, uint32_t rank, uint32_t world, uint32_t slots) {
  CKPT_ASSIGN_OR_RETURN(const CaptureFile file, CaptureFile::Make(std::move(capture), rank, world));
  SnapshotSize size{file.bytes()};
  for (const CopyRun& run : file.Runs(0, file.bytes(), true)) size.lazy_bytes += run.bytes;
  const uint64_t chunks = ArenaShape().ChunksFor(file.bytes()) * std::max<uint32_t>(slots, 1);
  size.arena_bytes = chunks * ArenaShape().chunk_bytes;
  return size;
}

}  // namespace ckptfs
