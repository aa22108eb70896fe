// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/scan.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <iterator>
#include <map>
#include <optional>
#include <set>

#include "core/base/parallel.h"
#include "core/base/strings.h"
#include "core/io/file_root.h"
#include "core/io/union_root.h"
#include "core/store/lives.h"

namespace ckptfs {
namespace {

constexpr std::string_view kLatest = "latest";
// Directories in one place that are looked into for runs.
constexpr size_t kMaxRuns = 4096;
constexpr int kMaxHintLooks = 200;
// Entries of one place of which it is asked what they are, if they are not steps.
constexpr size_t kMaxUnread = 1 << 16;
constexpr size_t kShownNames = 3;  // of many, in messages

// Directories above the one that is given: a run's, a save directory, a tag.
constexpr int kAbove = 2;

struct Job {
  FoundStep found;
  Status complete;
  std::optional<Result<StepModel>> outcome;  // nothing if it is not complete
};

// "3 directories (a, b, c)", "40 files (x, y, z, ...)"
std::string Counted(const std::vector<std::string>& names, std::string_view one,
                    std::string_view many) {
  std::string list;
  for (size_t i = 0; i < std::min(names.size(), kShownNames); ++i) {
    list += StrCat(i == 0 ? "" : ", ", names[i]);
  }
  if (names.size() > kShownNames) list += ", ...";
  return StrCat(names.size(), " ", names.size() == 1 ? one : many, " (", list, ")");
}

// Describes a place to a user who expected a checkpoint there.
std::string Contents(const Place& place) {
  const auto entries = place.root->List(place.directory);
  if (!entries) return "";  // a file
  std::vector<std::string> directories, files;
  for (const RootEntry& entry : *entries) {
    (entry.kind == EntryKind::kDirectory ? directories : files).push_back(entry.name);
  }
  if (directories.empty() && files.empty()) return "the directory is empty; ";
  std::string out = "it holds ";
  if (!directories.empty()) out += Counted(directories, "directory", "directories");
  if (!directories.empty() && !files.empty()) out += " and ";
  if (!files.empty()) out += Counted(files, "file", "files");
  return out + "; ";
}

// Steps by their directories, so that what lies below one is found in the order of their
// number: a run may have tens of thousands.
class ByDirectory {
 public:
  void Add(const FoundStep& step) { steps_.emplace(step.candidate.directory, &step); }

  // Until `visit` says true.
  template <class Visit>
  bool AnyAt(const std::string& directory, const Visit& visit) const {
    const auto [begin, end] = steps_.equal_range(directory);
    return std::any_of(begin, end, [&](const auto& at) { return visit(*at.second); });
  }
  template <class Visit>
  bool AnyBelow(const std::string& directory, const Visit& visit) const {
    const auto begin = steps_.lower_bound(directory + "/");
    return std::any_of(begin, steps_.lower_bound(directory + "0"),  // '/' and one more
                       [&](const auto& at) { return visit(*at.second); });
  }
  // Directories above one, the root apart.
  template <class Visit>
  bool AnyAbove(const std::string& directory, const Visit& visit) const {
    for (std::string above = ParentPath(directory); !above.empty(); above = ParentPath(above)) {
      if (AnyAt(above, visit)) return true;
    }
    return false;
  }

 private:
  std::multimap<std::string, const FoundStep*> steps_;
};

// A save directory holds what was saved at many moments; its own files are of one
// that nothing tells.
bool IsSaveDirectory(const StepCandidate& step) { return step.directory == step.save; }

// True if a source has no other step below the directory.
bool IsAloneBelow(const ByDirectory& of_source, const std::string& directory) {
  size_t count = 0;
  of_source.AnyBelow(directory, [&](const FoundStep&) { return ++count > 1; });
  return count == 1;
}

// True if a directory and what another source found in it are of one moment: the only step
// there, or all with the directory's number.
bool IsOneMoment(const StepCandidate& outer, const ByDirectory& inner) {
  if (IsAloneBelow(inner, outer.directory)) return true;
  bool same = true;
  inner.AnyBelow(outer.directory, [&](const FoundStep& step) {
    same = step.candidate.iteration == outer.iteration;
    return !same;
  });
  return outer.iteration != 0 && same;
}

// Removes steps that an earlier source has already claimed.  The only part of its kind, or the
// parts with its number in the same tree of one moment, belong to that step.
void KeepEachOnce(std::vector<FoundStep>& found) {
  std::map<const Source*, ByDirectory> of_source;
  for (const FoundStep& step : found) of_source[step.source].Add(step);
  ByDirectory kept;
  std::vector<bool> keep;
  for (const FoundStep& step : found) {
    const std::string& directory = step.candidate.directory;
    const auto others = [&](const FoundStep& other) { return other.source != step.source; };
    const auto outer = [&](const FoundStep& other) {
      return others(other) && !IsSaveDirectory(other.candidate) &&
             IsOneMoment(other.candidate, of_source[step.source]);
    };
    const auto inner = [&](const FoundStep& other) {
      return others(other) && IsOneMoment(step.candidate, of_source[other.source]);
    };
    const bool known = kept.AnyAt(directory, others) || kept.AnyAbove(directory, outer) ||
                       (!IsSaveDirectory(step.candidate) && kept.AnyBelow(directory, inner));
    keep.push_back(!known);
    if (!known) kept.Add(step);
  }
  size_t at = 0;
  std::erase_if(found, [&](const FoundStep&) { return !keep[at++]; });
}

// True for a malformed step among others that its framework does not call the
// latest: so a save that was cut off looks, and the others are sound.
bool IsCutOff(const Error& error, const StepCandidate& step, const std::string& directory) {
  return error.code == ErrorCode::kInvalid && !step.latest && step.Own() != directory;
}

// True for a step that may be looked at, and is not whole: a save that is under way, or died.
bool IsIncomplete(const Error& error) {
  return error.code != ErrorCode::kPermission && error.code != ErrorCode::kIo;
}

// Sorts a step's outcome into the steps, the skipped or the refused.
void Settle(Job& job, const std::string& directory, IngestResult& result) {
  const StepCandidate& step = job.found.candidate;
  if (!job.complete) {
    Error error = std::move(job.complete).error();
    if (!IsIncomplete(error)) {
      result.refused.push_back(std::move(error).WithContext(step.id));
    } else if (step.Own() == directory) {
      result.refused.push_back(std::move(error));
    } else {
      const bool whole = error.code == ErrorCode::kUnsupported;  // and not read
      result.skipped.push_back(StrCat(step.id, whole ? ": " : ": incomplete: ", error.message));
    }
    return;
  }
  if (*job.outcome) {
    result.steps.push_back(
        IngestedStep{std::move(job.found.candidate), **std::move(job.outcome), job.found.source});
    return;
  }
  Error error = std::move(*job.outcome).error().WithContext(step.id);
  if (IsCutOff(error, step, directory)) {
    result.skipped.push_back(std::move(error.message));
  } else {
    result.refused.push_back(std::move(error));
  }
}

// Groups of directories that are alike, one line each.
void NameUnread(const Place& place, const std::map<std::string, std::vector<std::string>>& alike,
                std::vector<Error>& unread) {
  for (const auto& [what, paths] : alike) {
    const bool itself = paths.size() == 1 && paths[0] == place.directory;
    std::vector<std::string> names;
    for (const std::string& path : paths) names.push_back(LastComponent(path));
    const std::string which = itself ? ""
                              : names.size() == 1
                                  ? StrCat("/", names[0])
                                  : StrCat(": ", Counted(names, "directory", "directories"));
    unread.push_back(Error{ErrorCode::kUnsupported, StrCat(place.Path(), which, ": ", what)});
  }
}

std::string WithoutDigits(std::string_view name) {
  std::string out(name);
  std::erase_if(out, [](char letter) { return IsDigit(letter); });
  return out;
}

// True if a name has the form of the numbered steps that are there, or there are none: "epoch_2"
// beside checkpoint-1 is somebody else's.
bool IsNamedLike(std::string_view name, const std::vector<FoundStep>& steps) {
  const std::string form = WithoutDigits(name);
  bool numbered = false;
  for (const FoundStep& step : steps) {
    const std::string other = LastComponent(step.candidate.Own());
    if (WithoutDigits(other) == other) continue;
    numbered = true;
    if (WithoutDigits(other) == form) return true;
  }
  return !numbered;
}

// Describes a place and the directories in it where no source has a step.
Status FindUnread(const Place& place, const ToolHints& hints, ScanResult& scan) {
  std::map<std::string, std::vector<std::string>> alike;
  std::set<std::string_view> known;
  for (const FoundStep& step : scan.steps)
    known.insert({step.candidate.Own(), step.candidate.directory});
  // Everything in a place that is one step belongs to it: lingua's consolidated/, a Llama's
  // original/.  If it has others, too, its files do: Flax weights beside a hub's.
  const bool step_itself = std::ranges::any_of(
      scan.steps, [&](const FoundStep& step) { return step.candidate.Own() == place.directory; });
  const bool alone = step_itself && scan.steps.size() == 1;
  const auto look = [&](const std::string& path) -> Status {
    if (known.contains(path)) return {};
    CKPT_ASSIGN_OR_RETURN(const auto what, hints.recognise(*place.root, path));
    const std::string name = LastComponent(place.root->PathOf(path));
    if (what && !what->step && !alone) alike[what->what].push_back(path);
    if (what && what->step && IsNamedLike(name, scan.steps)) {
      scan.begun.push_back({path, name, *what->step, what->what});
    }
    return {};
  };
  CKPT_RETURN_IF_ERROR(look(place.directory));
  const auto entries = place.root->List(place.directory);
  size_t looked = 0;
  for (const RootEntry& entry : alike.empty() && entries ? *entries : std::vector<RootEntry>()) {
    if (entry.kind == EntryKind::kOther) continue;
    if (step_itself && entry.kind == EntryKind::kFile) continue;
    if (++looked > kMaxUnread) break;
    CKPT_RETURN_IF_ERROR(look(JoinPath(place.directory, entry.name)));
  }
  NameUnread(place, alike, scan.unread);
  return {};
}

// True if there is anything that is known, read or not.
Result<bool> LookAt(const Place& place, Sources sources, const ToolHints& hints, ScanResult& scan) {
  ScanResult here;
  for (const auto& source : sources) {
    CKPT_ASSIGN_OR_RETURN(std::vector<StepCandidate> candidates,
                          source->Find(place.root, place.directory));
    for (StepCandidate& candidate : candidates) {
      // A run's newest step has that name; a file that has it is a pointer.
      if (candidate.id == kLatest) {
        CKPT_ASSIGN_OR_RETURN(const bool step, HasDirectory(*place.root, candidate.directory));
        if (step) candidate.id += "-1";
      }
      here.steps.push_back(FoundStep{std::move(candidate), source.get()});
    }
  }
  KeepEachOnce(here.steps);
  if (hints.recognise) CKPT_RETURN_IF_ERROR(FindUnread(place, hints, here));
  const bool any = !here.steps.empty() || !here.unread.empty();
  std::move(here.steps.begin(), here.steps.end(), std::back_inserter(scan.steps));
  std::move(here.begun.begin(), here.begun.end(), std::back_inserter(scan.begun));
  std::move(here.unread.begin(), here.unread.end(), std::back_inserter(scan.unread));
  return any;
}

// One of the folders in a directory that hold a run's steps and do not name it.
Result<bool> LookInStepsFolders(const Place& place, Sources sources, const ToolHints& hints,
                                ScanResult& scan) {
  for (const std::string_view name : hints.names.steps_folders) {
    const std::string path = JoinPath(place.directory, name);
    CKPT_ASSIGN_OR_RETURN(const bool there, HasDirectory(*place.root, path));
    if (!there) continue;
    CKPT_ASSIGN_OR_RETURN(const bool any, LookAt(Place{place.root, path}, sources, hints, scan));
    if (any) return true;
  }
  return false;
}

// Nothing of ours: it cannot be looked into, or is not there any more.
bool IsOutOfReach(const Error& error) {
  return error.code == ErrorCode::kPermission || error.code == ErrorCode::kNotFound;
}

// The directories in a place, as places; links, which may lead anywhere, are not
// followed.
Result<std::vector<Place>> PlacesIn(const Place& place) {
  std::vector<Place> places;
  const auto entries = place.root->List(place.directory);
  for (const RootEntry& entry : entries ? *entries : std::vector<RootEntry>()) {
    if (entry.kind != EntryKind::kDirectory || !entry.link.empty()) continue;
    places.push_back(Place{place.root, JoinPath(place.directory, entry.name)});
  }
  if (places.size() <= kMaxRuns) return places;
  return Fail(Error{ErrorCode::kUnsupported,
                    StrCat(place.Path(), ": no step of its own; it has ", places.size(),
                           " directories, and ckptfs searches at most ", kMaxRuns, " for runs")}
                  .Needing("name the runs themselves"));
}

// A file of tensors in a directory, by its name; nothing if it has none.
std::optional<std::string> SavedFileIn(const Place& place, const ToolNames& names) {
  const auto entries = place.root->List(place.directory);
  for (const RootEntry& entry : entries ? *entries : std::vector<RootEntry>()) {
    if (entry.kind == EntryKind::kFile && names.IsSaved(entry.name)) return entry.name;
  }
  return std::nullopt;
}

// The runs in the directories of one that holds none itself.
Status LookBelow(const Place& place, Sources sources, const ToolHints& hints, ScanResult& scan) {
  CKPT_ASSIGN_OR_RETURN(const bool own, LookInStepsFolders(place, sources, hints, scan));
  if (own) return {};
  CKPT_ASSIGN_OR_RETURN(const std::vector<Place> places, PlacesIn(place));
  std::vector<std::string> runs;
  std::vector<std::string> others;
  for (const Place& inner : places) {
    auto any = LookAt(inner, sources, hints, scan);
    if (any && !*any) any = LookInStepsFolders(inner, sources, hints, scan);
    if (!any && any.error().code == ErrorCode::kUnsupported) {  // more than is looked into
      scan.unread.push_back(any.error());
      continue;
    }
    if (!any && !IsOutOfReach(any.error())) return Fail(std::move(any).error());
    if (any && *any) {
      runs.push_back(LastComponent(inner.directory));
    } else if (const auto file = SavedFileIn(inner, hints.names)) {
      others.push_back(StrCat(LastComponent(inner.directory), " (", *file, ")"));
    }
  }
  if (runs.empty()) return {};
  scan.said.push_back(StrCat(
      place.Path(), ": no step of its own; one level below: ", Counted(runs, "run", "runs")));
  if (others.empty()) return {};
  scan.said.push_back(StrCat(place.Path(), ": not taken, since no step is recognised there: ",
                             Counted(others, "directory", "directories"),
                             "; a file of weights is adopted by its own path"));
  return {};
}

// Names the directories beside a run's steps that hold a model which is none of them ("best").
// A directory that cannot be looked into is not named.
void NameOthers(const Place& place, Sources sources, ScanResult& scan) {
  ByDirectory steps;
  for (const FoundStep& step : scan.steps) steps.Add(step);
  const auto any = [](const FoundStep&) { return true; };
  const auto places = PlacesIn(place);
  if (steps.AnyAt(place.directory, any) || !places) return;
  std::vector<std::string> others;
  for (const Place& inner : *places) {
    if (steps.AnyAt(inner.directory, any) || steps.AnyBelow(inner.directory, any)) continue;
    ScanResult found;
    const auto model = LookAt(inner, sources, {}, found);
    if (model && *model) others.push_back(LastComponent(inner.directory));
  }
  if (others.empty()) return;
  scan.said.push_back(StrCat(place.Path(), ": beside these steps, separate models lie in ",
                             Counted(others, "directory", "directories"),
                             "; they are not adopted with the steps: give their paths"));
}

// A directory in which there are runs, though they lie deeper than is looked; of the first ones.
std::optional<std::string> RunsFurtherBelow(const Place& place, Sources sources,
                                            const ToolNames& names) {
  int looks = 0;
  const auto places = PlacesIn(place);
  if (!places) return std::nullopt;
  for (const Place& inner : *places) {
    if (++looks > kMaxHintLooks) return std::nullopt;
    const auto innermost = PlacesIn(inner);
    if (!innermost) continue;
    for (const Place& one : *innermost) {
      if (++looks > kMaxHintLooks) return std::nullopt;
      ScanResult found;
      auto any = LookAt(one, sources, {}, found);
      if (any && !*any) any = LookInStepsFolders(one, sources, ToolHints{{}, names}, found);
      if (any && *any) return inner.Path();
    }
  }
  return std::nullopt;
}

// All of a place, its own or one level below.
Result<ScanResult> ScanAll(const Place& place, Sources sources, const ToolHints& hints) {
  ScanResult scan;
  CKPT_ASSIGN_OR_RETURN(const bool there, LookAt(place, sources, hints, scan));
  if (!there) CKPT_RETURN_IF_ERROR(LookBelow(place, sources, hints, scan));
  ByDirectory steps;
  for (const FoundStep& step : scan.steps) steps.Add(step);
  const auto any = [](const FoundStep&) { return true; };
  std::erase_if(scan.begun, [&](const BegunStep& begun) {  // a run that is named like a step
    return steps.AnyBelow(begun.directory, any);
  });
  return scan;
}

std::vector<IngestedStep> InOrderOfSaves(std::vector<IngestedStep> steps) {
  std::vector<std::string> directories;
  for (const IngestedStep& step : steps) directories.push_back(step.candidate.SavePath());
  std::vector<FoundSave> saves;
  for (size_t i = 0; i < steps.size(); ++i) {
    const StepCandidate& step = steps[i].candidate;
    saves.push_back({directories[i], steps[i].model.iteration, step.mtime_ns, step.converted,
                     step.latest, step.version});
  }
  return InOrder(std::move(steps), OrderOfSaves(saves));
}

}  // namespace

Result<Place> PlaceOf(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), std::free);
  if (!real) return Fail(ErrnoError(errno, path));
  std::string top = real.get();
  for (int i = 0; i < kAbove && top.size() > 1; ++i) {
    top = top.substr(0, std::max<size_t>(top.rfind('/'), 1));
  }
  const std::string_view below = std::string_view(real.get()).substr(top.size());
  Place place{std::make_shared<FileRoot>(top),
              std::string(below.substr(below.starts_with('/') ? 1 : 0))};
  CKPT_ASSIGN_OR_RETURN(const EntryStat found, place.root->Stat(place.directory));
  if (found.kind != EntryKind::kOther) return place;
  return Fail(Error{ErrorCode::kInvalid, StrCat(path, ": neither a directory nor a file")}.Needing(
      "give a checkpoint or the directory that holds several"));
}

Result<Place> PlaceOfUnion(const std::vector<std::string>& paths) {
  std::vector<UnionPart> parts;
  for (const std::string& path : paths) {
    CKPT_ASSIGN_OR_RETURN(Place place, PlaceOf(path));
    CKPT_ASSIGN_OR_RETURN(const bool directory, HasDirectory(*place.root, place.directory));
    if (!directory) {
      return Fail(ErrorCode::kInvalid,
                  StrCat(path, ": not a directory: only directories are joined"));
    }
    parts.push_back({std::move(place.root), std::move(place.directory)});
  }
  std::ranges::sort(parts, {}, [](const UnionPart& part) { return StrCat(part.Path(), "/"); });
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::string outer = parts[i - 1].Path(), inner = parts[i].Path();
    if (!StrCat(inner, "/").starts_with(StrCat(outer, "/"))) continue;
    return Fail(ErrorCode::kInvalid, StrCat(inner, ": is or lies in ", outer,
                                            ": directories that are joined lie beside each other"));
  }
  if (parts.size() == 1) return Place{parts.front().root, parts.front().directory};
  std::string directory = parts.front().directory;
  return Place{std::make_shared<UnionRoot>(std::move(parts)), std::move(directory)};
}

std::string FormatNames(Sources sources) {
  std::string names;
  for (const auto& source : sources) names += StrCat(names.empty() ? "" : ", ", source->name());
  return names;
}

std::string WhatIsThere(const Place& place, Sources sources) {
  return StrCat(
      Contents(place), "looked for the formats ", FormatNames(sources),
      " (a directory of runs, a save directory, one step's own directory, or a file of weights)");
}

// The path of the first file there that its name calls one of weights; empty if there is none.
std::string FileOfWeights(const Place& place) {
  constexpr std::string_view kEnds[] = {".pt", ".pth", ".ckpt", ".bin", ".safetensors"};
  std::string first;
  const auto entries = place.root->List(place.directory);
  for (const RootEntry& entry : entries ? *entries : std::vector<RootEntry>()) {
    const bool named =
        std::ranges::any_of(kEnds, [&](std::string_view end) { return entry.name.ends_with(end); });
    if (entry.kind != EntryKind::kFile || !named) continue;
    if (first.empty() || entry.name < first) first = entry.name;
  }
  return first.empty() ? "" : place.root->PathOf(JoinPath(place.directory, first));
}

Result<ScanResult> ScanPlace(const Place& place, Sources sources, const ToolHints& hints) {
  CKPT_ASSIGN_OR_RETURN(ScanResult scan, ScanAll(place, sources, hints));
  if (!scan.steps.empty() && hints.recognise && scan.said.empty()) NameOthers(place, sources, scan);
  if (!scan.steps.empty()) return scan;
  if (!scan.unread.empty()) return Fail(std::move(scan.unread.front()));
  if (!scan.begun.empty()) {
    const BegunStep& begun = scan.begun.front();
    return Fail(ErrorCode::kInvalid,
                StrCat(place.root->PathOf(begun.directory), ": not whole: ", begun.missing));
  }
  Error none{ErrorCode::kNotFound,
             StrCat(place.Path(), ": no checkpoint found: ", WhatIsThere(place, sources))};
  // So that "nothing here" is not the end of it.
  const auto below = RunsFurtherBelow(place, sources, hints.names);
  if (below)
    return Fail(std::move(none).Needing(StrCat("there are runs further below: give ", *below)));
  const std::string file = FileOfWeights(place);
  if (file.empty()) return Fail(std::move(none));
  return Fail(std::move(none).Needing(
      StrCat("a file of weights is a checkpoint by itself: give the file, such as ", file)));
}

Result<ScanResult> ScanIfAny(const Place& place, Sources sources, const ToolHints& hints) {
  return ScanAll(place, sources, hints);
}

Result<std::vector<FoundStep>> Scan(const Place& place, Sources sources) {
  CKPT_ASSIGN_OR_RETURN(ScanResult scan, ScanPlace(place, sources, {}));
  return std::move(scan.steps);
}

Result<StepModel> IngestStep(const FoundStep& found, const SourceOptions& options) {
  const SaveState state =
      found.state ? *found.state : found.source->StateOf(found.candidate, options, {});
  CKPT_RETURN_IF_ERROR(state.Readable());
  return found.source->Read(found.candidate, options);
}

namespace {

// Why none of the steps is taken, each by its name.
Error NoneOf(const Place& place, IngestResult result) {
  constexpr size_t kNamed = 8;
  std::vector<std::string> others = std::move(result.skipped);
  for (size_t i = 1; i < result.refused.size(); ++i) others.push_back(result.refused[i].message);
  Error error{ErrorCode::kInvalid, StrCat(place.Path(), ": no complete step that can be read")};
  if (!result.refused.empty()) error = std::move(result.refused.front());
  for (size_t i = 0; i < std::min(others.size(), kNamed); ++i)
    error.message += StrCat("; ", others[i]);
  if (others.size() > kNamed) error.message += StrCat("; and ", others.size() - kNamed, " more");
  return error;
}

}  // namespace

Result<IngestResult> IngestPlace(const Place& place, Sources sources, const SourceOptions& options,
                                 const ToolHints& hints) {
  CKPT_ASSIGN_OR_RETURN(ScanResult scan, ScanPlace(place, sources, hints));
  std::vector<Job> jobs;
  const SaveHistory history{.listings = std::make_shared<RunListings>()};
  for (FoundStep& step : scan.steps) {
    Status complete = step.source->StateOf(step.candidate, options, history).Readable();
    jobs.push_back(Job{std::move(step), std::move(complete), std::nullopt});
  }
  ParallelFor(jobs.size(), [&](size_t i) {
    if (!jobs[i].complete) return;
    jobs[i].outcome = jobs[i].found.source->Read(jobs[i].found.candidate, options);
  });
  IngestResult result;
  for (Job& job : jobs) Settle(job, place.directory, result);
  for (const BegunStep& begun : scan.begun) {
    result.skipped.push_back(StrCat(begun.id, ": not whole: ", begun.missing));
  }
  std::move(scan.unread.begin(), scan.unread.end(), std::back_inserter(result.refused));
  result.said = std::move(scan.said);
  if (result.steps.empty()) return Fail(NoneOf(place, std::move(result)));
  result.steps = InOrderOfSaves(std::move(result.steps));
  return result;
}

}  // namespace ckptfs
