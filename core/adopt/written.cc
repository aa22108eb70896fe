// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/written.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "core/base/parallel.h"
#include "core/base/strings.h"
#include "core/io/file_root.h"
#include "core/io/write_traces.h"
#include "core/model/read_blobs.h"
#include "core/model/step_notes.h"

namespace ckptfs {
namespace {

// Returns what `look` says of each file that counts; passes over files that cannot be opened.
template <class Look>
std::vector<std::string> LookAtFiles(const StepModel& model, const ToolNames& names,
                                     const Look& look) {
  const std::vector<uint8_t> read = FindReadBlobs(model);
  std::vector<std::string> all(model.blobs.size());
  ParallelFor(model.blobs.size(), [&](size_t i) {
    const Blob& blob = model.blobs[i];
    if (read[i] == 0 && !names.IsSaved(blob.path)) return;
    const std::string& root = model.roots[blob.root];
    if (!root.starts_with('/')) return;
    const auto file = FileRoot(root).Open(blob.path);
    if (file) all[i] = look(**file);
  });
  std::erase(all, std::string());
  return all;
}

Status IsWritten(const std::string& name) {
  return Fail(
      Error{ErrorCode::kStale,
            StrCat(name, ": a process has it open for writing: it is being saved or copied")}
          .Needing("wait until it is closed; `adopt --check never` takes the step as it is"));
}

}  // namespace

Status CheckNoWriter(const StepModel& model, const ToolNames& names) {
  const std::vector<std::string> open = LookAtFiles(model, names, [](const File& file) {
    return IsOpenForWriting(file) ? file.name() : std::string();
  });
  return open.empty() ? Status() : IsWritten(open.front());
}

Status CheckNoWriter(const Root& root, const std::map<std::string, FileStamp>& files,
                     const ToolNames& names) {
  if (!root.local()) return {};
  for (const auto& [path, _] : files) {
    if (!names.IsSaved(path) && !names.IsPart(LastComponent(path))) continue;
    const auto file = root.Open(path);
    if (file && IsOpenForWriting(**file)) return IsWritten((*file)->name());
  }
  return {};
}

std::string NeverWritten(const StepModel& model, const ToolNames& names) {
  const std::vector<std::string> blank = LookAtFiles(model, names, [](const File& file) {
    const uint64_t bytes = BytesNeverWritten(file);
    return bytes == 0 ? std::string()
                      : StrCat(file.name(), ": ", bytes, " of its ", file.size(),
                               " bytes were never written");
  });
  if (blank.empty()) return "";
  const size_t more = blank.size() - 1;
  return more == 0 ? blank.front()
                   : StrCat(blank.front(), " (and ", Counted(more, "more file"), ")");
}

namespace {

struct NamedFile {
  std::string name;  // "" for one that cannot be opened
  StepFile file;
};

// The files of the step, as they lie on this machine; all of them, since each may tell that a copy
// went on.
std::vector<NamedFile> TimesOf(const StepModel& model) {
  const std::vector<uint8_t> read = FindReadBlobs(model);
  std::vector<NamedFile> all(model.blobs.size());
  ParallelFor(model.blobs.size(), [&](size_t i) {
    const Blob& blob = model.blobs[i];
    const std::string& root = model.roots[blob.root];
    if (!root.starts_with('/')) return;
    const auto file = FileRoot(root).Open(blob.path);
    const auto times = file ? WriteTimesOf(**file) : std::nullopt;
    if (times) all[i] = {model.PathOf(blob), {*times, (*file)->size(), read[i] != 0, read[i] != 0}};
  });
  std::erase_if(all, [](const NamedFile& one) { return one.name.empty(); });
  return all;
}

std::string DescribeAnew(const std::vector<NamedFile>& files, int64_t sealed_ns,
                         std::string_view after) {
  std::vector<StepFile> times;
  for (const NamedFile& one : files) times.push_back(one.file);
  const std::vector<size_t> anew = FindWrittenAnew(times, sealed_ns);
  if (anew.empty()) return "";
  const size_t more = anew.size() - 1;
  return StrCat(files[anew.front()].name,
                more == 0 ? "" : StrCat(" (and ", ckptfs::Counted(more, "more file"), ")"),
                ": written anew after ", after,
                ": a save over this step may have died, and then files of two saves lie in it");
}

// last: the name of the file that is written last; sealed_ns: when it was.
std::string WrittenAnew(std::vector<NamedFile> files, const ToolNames& names, std::string_view last,
                        int64_t sealed_ns) {
  for (NamedFile& one : files) one.file.saved = one.file.saved || names.IsSaved(one.name);
  return DescribeAnew(files, sealed_ns, StrCat(last, ", which its tool writes last"));
}

std::string WrittenAnew(std::vector<NamedFile> files, const Root& root, const WrittenAfter& last) {
  const auto sealed = root.Stat(last.path);
  if (!sealed) return "";
  const int64_t sealed_ns = sealed->stamp.mtime_ns;
  std::set<std::string> others;
  for (const std::string& file : last.files) others.insert(root.PathOf(file));
  bool older = false;
  for (NamedFile& one : files) {
    one.file.read = one.file.saved = others.contains(one.name);
    older = older || (one.file.read && one.file.times.written_ns <= sealed_ns);
    // Programs that fetch several files at once have begun with some before the last is there.
    const bool begun = one.file.times.born_ns < sealed_ns;
    if (last.together && one.file.read && begun) one.file.times.born_ns = 0;
  }
  if (last.together && !older) return "";
  return DescribeAnew(files, sealed_ns, StrCat(LastComponent(last.path), ", ", last.order));
}

std::string WrittenAnew(const IngestedStep& step, const SourceOptions& options,
                        const ToolNames& names) {
  const StepCandidate& found = step.candidate;
  if (!found.root->local()) return "";
  const SaveState state = step.source->StateOf(found, options, {});
  const bool unproven = state.phase == SavePhase::kProvisional && !state.last.empty();
  if (!unproven && state.after.empty()) return "";
  const std::vector<NamedFile> files = TimesOf(step.model);
  std::string out;
  if (unproven) {
    const auto sealed = found.root->Stat(state.last);
    if (sealed) out = WrittenAnew(files, names, LastComponent(state.last), sealed->stamp.mtime_ns);
  }
  for (size_t i = 0; i < state.after.size() && out.empty(); ++i)
    out = WrittenAnew(files, *found.root, state.after[i]);
  return out;
}

}  // namespace

std::string NoteWrittenAnew(IngestedStep& step, const SourceOptions& options,
                            const ToolNames& names) {
  std::string anew = WrittenAnew(step, options, names);
  if (!anew.empty()) step.model.notes.push_back(StrCat(kTimesNote, anew));
  return anew;
}

}  // namespace ckptfs
