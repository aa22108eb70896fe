// SPDX-License-Identifier: Apache-2.0
//
// Tags: names that users give to steps, beside their ids.
//
//   tags/<run>/<name>/<n>   record: {"step": "<identity, 32 digits> <id>"}, or {"step": ""}: gone
//
// The greatest n counts, and stays when the tag is gone, so that no number is used twice; older
// ones go when another is there.  A tag means the step that had it given, not whatever has its
// id later: its identity tells.
#include <charconv>

#include "core/base/names.h"
#include "core/base/strings.h"
#include "core/records/records.h"
#include "core/store/store_state.h"

namespace ckptfs {
namespace {

constexpr int kMaxTagRaces = 100;
constexpr std::string_view kTagKey = "step";
constexpr size_t kIdentityDigits = 32;

struct TagRecord {
  std::optional<uint64_t> n;   // of the newest; none: there never was such a tag
  std::optional<StepTag> tag;  // none: it is gone
  std::vector<uint64_t> older;
};

std::string FolderOf(std::string_view run, std::string_view name) {
  return StrCat("tags/", run, "/", name);
}

std::optional<uint64_t> NumberOf(std::string_view text) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

Result<TagRecord> ReadTag(const Storage& storage, std::string_view run, std::string_view name) {
  TagRecord found;
  const std::string folder = FolderOf(run, name);
  CKPT_ASSIGN_OR_RETURN(const auto names, ListFilesBelow(storage, folder));
  for (const std::string& path : names) {
    const auto number = NumberOf(LastComponent(path));
    if (!number) continue;
    found.older.push_back(*number);
    found.n = std::max(found.n.value_or(0), *number);
  }
  if (!found.n) return found;
  std::erase(found.older, *found.n);
  const std::string path = StrCat(folder, "/", *found.n);
  CKPT_ASSIGN_OR_RETURN(const std::string text, ReadWhole(storage, path, kRecordMaxBytes));
  auto value = ParseText(text, kTagKey);
  if (!value) return Fail(std::move(value).error().WithContext(path));
  if (value->empty()) return found;
  const auto identity = DigestNamed(std::string_view(*value).substr(0, kIdentityDigits));
  if (!identity || value->size() < kIdentityDigits + 2 || (*value)[kIdentityDigits] != ' ') {
    return Fail(ErrorCode::kDataLoss, StrCat(path, ": is not a tag"));
  }
  found.tag = StepTag{std::string(name), value->substr(kIdentityDigits + 1), *identity};
  return found;
}

// `value` is the newest record of the tag.  False if another process was faster.
Result<bool> WriteTag(Storage& storage, std::string_view run, std::string_view name,
                      const TagRecord& before, const std::string& value) {
  const uint64_t n = before.n ? *before.n + 1 : 0;
  const std::string folder = FolderOf(run, name);
  const Status published = PublishText(storage, StrCat(folder, "/", n), RenderText(kTagKey, value));
  if (!published && published.error().code == ErrorCode::kExists) return false;
  if (!published) return Fail(Error(published.error()));
  std::vector<uint64_t> older = before.older;
  if (before.n) older.push_back(*before.n);
  for (const uint64_t number : older) (void)storage.Remove(StrCat(folder, "/", number));
  return true;
}

Result<std::vector<StepTag>> TagsOf(Storage& storage, std::string_view run) {
  const std::string folder = StrCat("tags/", run);
  CKPT_ASSIGN_OR_RETURN(const auto paths, ListFilesBelow(storage, folder));
  std::set<std::string> names;
  for (const std::string& path : paths) {
    const std::string below = path.substr(folder.size() + 1);
    names.insert(below.substr(0, below.find('/')));
  }
  std::vector<StepTag> tags;
  for (const std::string& name : names) {
    if (!CheckName(name, "tag")) continue;
    CKPT_ASSIGN_OR_RETURN(auto found, ReadTag(storage, run, name));
    if (found.tag) tags.push_back(*std::move(found.tag));
  }
  return tags;
}

Error NoSuch(std::string_view run, std::string_view id) {
  return Error{ErrorCode::kNotFound, StrCat("no step '", id, "' in run '", run, "'")};
}

}  // namespace

Result<StepRecord> Store::State::ResolveTag(std::string_view run, std::string_view name) {
  if (!CheckName(name, "tag") || !CheckName(run, "run")) return Fail(NoSuch(run, name));
  CKPT_ASSIGN_OR_RETURN(const TagRecord found, ReadTag(*storage, run, name));
  if (!found.tag) return Fail(NoSuch(run, name));
  CKPT_ASSIGN_OR_RETURN(const auto step, FindStep(run, found.tag->id));
  if (!step) {
    return Fail(ErrorCode::kNotFound, StrCat("tag '", name, "' of run '", run, "': its step '",
                                             found.tag->id, "' is gone"));
  }
  if (step->unpacked == found.tag->unpacked) return *step;
  return Fail(Error{ErrorCode::kStale, StrCat("tag '", name, "' of run '", run, "': step '",
                                              found.tag->id, "' is another one by now")}
                  .Needing("tag the step again"));
}

// Where the bytes are the source's they are gone with it, and the tag says so.
Result<bool> Store::State::IsKeptByTag(const StepRecord& record) {
  CKPT_ASSIGN_OR_RETURN(const auto tags, TagsOf(*storage, record.run));
  const bool tagged = std::ranges::any_of(tags, [&](const StepTag& tag) {
    return tag.id == record.id && tag.unpacked == record.unpacked;
  });
  if (!tagged) return false;
  CKPT_ASSIGN_OR_RETURN(const Needs held, NeedsOfManifest(record.manifest));
  return held.owned;
}

Result<std::vector<StepTag>> Store::Tags(std::string_view run) {
  CKPT_RETURN_IF_ERROR(CheckName(run, "run"));
  return TagsOf(*state_->storage, run);
}

Status Store::Tag(const StepRecord& record, std::string_view name) {
  CKPT_RETURN_IF_ERROR(CheckName(name, "tag"));
  if (name == "latest") return Fail(ErrorCode::kInvalid, "tag name: 'latest' is taken");
  CKPT_RETURN_IF_ERROR(Refresh());
  const auto there = state_->FindStep(record.run, name);
  if (!there || *there) {
    return Fail(ErrorCode::kExists,
                StrCat("run '", record.run, "' has a step of the name '", name, "'"));
  }
  const std::string value = StrCat(record.unpacked.Hex(), " ", record.id);
  for (int race = 0; race < kMaxTagRaces; ++race) {
    CKPT_ASSIGN_OR_RETURN(const TagRecord before, ReadTag(*state_->storage, record.run, name));
    const bool same =
        before.tag && before.tag->id == record.id && before.tag->unpacked == record.unpacked;
    if (same) return {};
    CKPT_ASSIGN_OR_RETURN(const bool done,
                          WriteTag(*state_->storage, record.run, name, before, value));
    if (done) return {};
  }
  return Fail(ErrorCode::kExhausted, StrCat("tag '", name, "' is being given all the time"));
}

Status Store::Untag(std::string_view run, std::string_view name) {
  CKPT_RETURN_IF_ERROR(CheckName(run, "run"));
  CKPT_RETURN_IF_ERROR(CheckName(name, "tag"));
  for (int race = 0; race < kMaxTagRaces; ++race) {
    CKPT_ASSIGN_OR_RETURN(const TagRecord before, ReadTag(*state_->storage, run, name));
    if (!before.tag) {
      return Fail(ErrorCode::kNotFound, StrCat("no tag '", name, "' in run '", run, "'"));
    }
    CKPT_ASSIGN_OR_RETURN(const bool done, WriteTag(*state_->storage, run, name, before, ""));
    if (done) return {};
  }
  return Fail(ErrorCode::kExhausted, StrCat("tag '", name, "' is being given all the time"));
}

}  // namespace ckptfs
