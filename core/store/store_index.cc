// SPDX-License-Identifier: Apache-2.0
#include "core/store/store_index.h"

#include <algorithm>
#include <charconv>

#include "core/base/strings.h"
#include "core/manifest/manifest.h"
#include "core/manifest/manifest_format.h"

namespace ckptfs {
namespace {

constexpr std::string_view kSettled = ".settled";

// The greatest number of an id, and whether a record has it: else the step was retired.
struct NewestNumber {
  uint64_t n = 0;
  bool record = false;
};

// Returns an entry for every (run, id) that the names mention.
std::map<std::pair<std::string, std::string>, NewestNumber> Newest(
    const std::vector<std::string>& names) {
  std::map<std::pair<std::string, std::string>, NewestNumber> newest;
  for (const std::string& text : names) {
    const auto record = ParseStepName(text, "steps");
    const auto name = record ? record : ParseRetiredName(text);
    if (!name) continue;  // not ours
    NewestNumber& known = newest[{name->run, name->id}];
    if (name->n > known.n) known = NewestNumber{name->n, false};
    if (name->n == known.n) known.record = known.record || record;
  }
  return newest;
}

}  // namespace

const IndexedStep* StoreIndex::Find(const std::string& run, const std::string& id) const {
  const auto found = runs.find(run);
  if (found == runs.end()) return nullptr;
  const auto step = found->second.find(id);
  return step == found->second.end() ? nullptr : &step->second;
}

bool StoreIndex::Put(IndexedStep step) {
  const IndexedStep* known = Find(step.name.run, step.name.id);
  if (known != nullptr && known->name.n >= step.name.n) return false;
  const StepName name = step.name;
  runs[name.run].insert_or_assign(name.id, std::move(step));
  return true;
}

bool StoreIndex::Drop(const StepName& name) {
  const IndexedStep* known = Find(name.run, name.id);
  if (known == nullptr || known->name.n > name.n) return false;
  const auto run = runs.find(name.run);
  run->second.erase(name.id);
  if (run->second.empty()) runs.erase(run);
  return true;
}

Result<bool> IsDeleted(const Storage& storage, const StepName& name) {
  const auto deletion = storage.Stat(DeletedName(name));
  if (!deletion && deletion.error().code != ErrorCode::kNotFound) {
    return Fail(Error(deletion.error()));
  }
  return deletion.has_value();
}

Result<bool> IsRetired(const Storage& storage, const StepName& name) {
  return HasFile(storage, RetiredName(name));
}

Result<std::optional<IndexedStep>> ReadStep(Storage& storage, const StepName& name,
                                            const KnownRecord& known, RecordTexts& added) {
  if (auto record = known(name)) return IndexedStep{name, *std::move(record)};
  const std::string key = StepRecordName(name);
  auto read = ReadWhole(storage, key, kRecordMaxBytes);
  if (!read && read.error().code == ErrorCode::kNotFound) {
    CKPT_ASSIGN_OR_RETURN(const bool deleted, IsDeleted(storage, name));
    CKPT_ASSIGN_OR_RETURN(const bool retired, IsRetired(storage, name));
    if (deleted || retired) return std::nullopt;
  }
  if (!read && read.error().code != ErrorCode::kInvalid) return Fail(std::move(read).error());
  auto record = read ? ParseStepRecord(*read, name) : Fail(Error(read.error()));
  if (!record) return IndexedStep{name, Fail(std::move(record).error().WithContext(key))};
  added.emplace(key, *std::move(read));
  return IndexedStep{name, *std::move(record)};
}

Result<StoreIndex> BuildStoreIndex(Storage& storage, const std::string& run,
                                   const KnownRecord& known, RecordTexts& added) {
  const std::string below = run.empty() ? "" : StrCat("/", run);
  CKPT_ASSIGN_OR_RETURN(const auto steps, ListFilesBelow(storage, StrCat("steps", below)));
  StoreIndex fresh;
  std::map<std::string, bool> removed;  // true: some step of the run was removed
  for (const auto& [key, newest] : Newest(steps)) {
    const StepName name{key.first, key.second, newest.n};
    // Deletions, of which there may be any number, are asked for one by one.
    const auto [any, first] = removed.try_emplace(name.run);
    if (first) {
      CKPT_ASSIGN_OR_RETURN(any->second, HasDirectory(storage, StrCat("deleted/", name.run)));
    }
    bool gone = !newest.record;
    if (any->second && !gone) {
      CKPT_ASSIGN_OR_RETURN(gone, IsDeleted(storage, name));
    }
    if (gone) {
      fresh.dead.push_back(name);
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(auto step, ReadStep(storage, name, known, added));
    if (step) fresh.Put(*std::move(step));
  }
  return fresh;
}

Result<Incarnation> LastIncarnation(Storage& storage, const std::string& run,
                                    const std::string& id) {
  Incarnation last;
  last.name = StepName{run, id, 0};
  // Deletions afterwards: they are there before a record goes.
  for (const std::string_view folder : {"steps", "deleted"}) {
    CKPT_ASSIGN_OR_RETURN(const auto names,
                          ListFilesBelow(storage, StrCat(folder, "/", run, "/", id)));
    for (const std::string& text : names) {
      const auto record = ParseStepName(text, folder);
      const auto name = record ? record : ParseRetiredName(text);
      if (!name || name->run != run || name->id != id) continue;
      if (last.any && name->n < last.name.n) continue;
      const bool live = record && folder == "steps";
      // A record beside its own retired name is that of a build which took the number again.
      const bool kept = last.any && name->n == last.name.n && last.live && !record;
      last.any = true;
      last.name.n = name->n;
      last.live = live || kept;
    }
  }
  return last;
}

Result<std::optional<Claim>> LatestClaim(Storage& storage, const std::string& run) {
  const std::string folder = StrCat("runs/", run);
  CKPT_ASSIGN_OR_RETURN(const auto names, ListFilesBelow(storage, folder));
  std::optional<Claim> latest;
  for (const std::string& name : names) {
    const std::string_view number = std::string_view(name).substr(folder.size() + 1);
    uint64_t n = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), n);
    if (error != std::errc() || end != number.data() + number.size()) continue;
    if (!latest || n > latest->n) latest = Claim{n, {}, false};
  }
  if (!latest) return latest;
  const std::string name = ClaimName(run, latest->n);
  latest->settled = std::binary_search(names.begin(), names.end(), StrCat(name, kSettled));
  CKPT_ASSIGN_OR_RETURN(const std::string text, ReadWhole(storage, name, kRecordMaxBytes));
  auto root = ParseText(text, "root");
  latest->old = root.has_value();
  if (!root) root = ParseText(text, "root", kClaimVersion);
  if (!root) return Fail(std::move(root).error().WithContext(name));
  latest->root = *std::move(root);
  return latest;
}

Status PublishClaim(Storage& storage, const std::string& run, const Claim& claim) {
  return PublishText(storage, ClaimName(run, claim.n),
                     RenderText("root", claim.root, kClaimVersion));
}

Status SettleClaim(Storage& storage, const std::string& run, const Claim& claim) {
  Status settled = PublishText(storage, StrCat(ClaimName(run, claim.n), kSettled),
                               RenderText("root", claim.root));
  if (!settled && settled.error().code != ErrorCode::kExists) return settled;
  return {};
}

Status PublishText(Storage& storage, std::string_view name, std::string_view text) {
  return storage.PublishIfAbsent(name, std::as_bytes(std::span(text)));
}

Result<StepModel> ParseNamedManifest(std::string_view bytes, const Digest& name,
                                     std::string_view blobs) {
  CKPT_ASSIGN_OR_RETURN(const ManifestEnvelope envelope, OpenManifest(bytes));
  if (envelope.digest != name) {
    return Fail(ErrorCode::kDataLoss, "the manifest does not have the digest in its name");
  }
  return ParseManifest(bytes, blobs);
}

}  // namespace ckptfs
