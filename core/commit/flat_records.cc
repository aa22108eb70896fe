// SPDX-License-Identifier: Apache-2.0
#include "core/commit/flat_records.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/records/commit_records.h"
#include "core/store/store_index.h"

namespace ckptfs {
namespace {

using Kind = CommitName::Kind;

struct FlatRecord {
  std::string path;
  CommitName name;
};

// The daemon that wrote it; nothing if that cannot be told.
Result<std::optional<Digest>> WriterOf(const Storage& storage, const FlatRecord& record) {
  if (record.name.kind == Kind::kPart) return record.name.node;
  const auto text = ReadWhole(storage, record.path, kPreparedMaxBytes);
  if (!text && text.error().code == ErrorCode::kNotFound) return std::optional(Digest());
  if (!text) return Fail(Error(text.error()));
  if (record.name.kind == Kind::kDone) {
    const auto done = ParseDone(*text);
    return done ? std::optional(done->node) : std::nullopt;
  }
  const auto outcome = ParseOutcome(*text, record.name);
  return outcome ? std::optional(outcome->node) : std::nullopt;
}

Status Move(Storage& storage, const FlatRecord& record) {
  const auto text = ReadWhole(storage, record.path, kPreparedMaxBytes);
  if (!text && text.error().code == ErrorCode::kNotFound) return {};
  if (!text) return Fail(Error(text.error()));
  const Status published = PublishText(storage, PathOf(record.name), *text);
  const bool there = published || published.error().code == ErrorCode::kExists;
  if (!there) return published;
  Status removed = storage.Remove(record.path);
  if (!removed && removed.error().code == ErrorCode::kNotFound) return {};
  return removed;
}

// Its outcome moves first, so that nobody decides it once more.
int OrderOf(const FlatRecord& record) {
  return record.name.kind == Kind::kDone ? 0 : record.name.kind == Kind::kOutcome ? 1 : 2;
}

}  // namespace

Status MoveFlatRecords(Storage& storage,
                       const std::function<Result<bool>(const Digest& node)>& has_gone) {
  const auto entries = storage.List(kPreparedFolder);
  if (!entries && entries.error().code == ErrorCode::kNotFound) return {};
  if (!entries) return Fail(Error(entries.error()));
  std::map<std::pair<Digest, uint64_t>, std::vector<FlatRecord>> attempts;
  for (const RootEntry& entry : *entries) {
    std::string path = StrCat(kPreparedFolder, "/", entry.name);
    const auto name = ParseFlatName(path);
    if (!name || IsLayoutMark(*name)) continue;
    if (name->kind != Kind::kRanks) {
      attempts[{name->job, name->attempt}].push_back({std::move(path), *name});
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(const bool gone, has_gone(name->node));
    if (gone) (void)storage.Remove(path);
  }
  for (auto& [key, records] : attempts) {
    bool gone = true;
    for (const FlatRecord& record : records) {
      CKPT_ASSIGN_OR_RETURN(const auto writer, WriterOf(storage, record));
      if (writer) {
        CKPT_ASSIGN_OR_RETURN(const bool its, has_gone(*writer));
        gone = gone && its;
      }
      gone = gone && writer;
    }
    if (!gone) continue;
    std::ranges::stable_sort(records, {}, OrderOf);
    for (const FlatRecord& record : records) CKPT_RETURN_IF_ERROR(Move(storage, record));
  }
  return {};
}

}  // namespace ckptfs
