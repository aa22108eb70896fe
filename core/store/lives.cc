// SPDX-License-Identifier: Apache-2.0
#include "core/store/lives.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

bool IsSnapshot(const StepRecord& record) { return record.root.starts_with(kSnapshotRoot); }

auto TimeOf(const StepRecord& record) {
  return std::tuple(record.mtime_ns, record.iteration, std::string_view(record.id));
}

bool IsEarlier(const StepRecord& a, const StepRecord& b) { return TimeOf(a) < TimeOf(b); }

// Ids of one kind differ in their digits, their versions and their attempts: "checkpoint", and not
// "best"; "epoch=-step=.ckpt" also of epoch=1-step=20-v1.ckpt.
std::string KindOf(const StepRecord& record) {
  constexpr std::string_view kVersion = "-v";
  std::string kind = record.id;
  std::erase_if(kind, [](char letter) { return IsDigit(letter); });
  while (kind.ends_with('-')) kind.pop_back();
  const size_t suffix = std::min(kind.rfind('.'), kind.size());
  if (std::string_view(kind).substr(0, suffix).ends_with(kVersion))
    kind.erase(suffix - kVersion.size(), kVersion.size());
  return kind;
}

// When each life began, by its number: the earliest time of its steps.
std::map<uint32_t, int64_t> BeginningsOf(std::span<const StepRecord> steps) {
  std::map<uint32_t, int64_t> begins;
  for (const StepRecord& step : steps) {
    if (step.converted) continue;  // its time is that of the conversion
    const auto [at, first] = begins.try_emplace(step.life, step.mtime_ns);
    at->second = std::min(at->second, step.mtime_ns);
  }
  return begins;
}

// The life of a save that begins none.
uint32_t LifeAtTime(std::span<const StepRecord> steps, const StepRecord& save) {
  const StepRecord* original = nullptr;
  for (const StepRecord& step : steps) {
    if (!save.converted || step.converted || step.iteration != save.iteration) continue;
    if (original == nullptr || IsOlder(*original, step)) original = &step;
  }
  if (original != nullptr) return original->life;
  const auto begins = BeginningsOf(steps);
  for (auto life = begins.rbegin(); life != begins.rend(); ++life) {
    if (life->second <= save.mtime_ns || std::next(life) == begins.rend()) return life->first;
  }
  return 0;
}

// The steps of the newest life that are of the save's kind.
std::vector<const StepRecord*> AlikeOf(std::span<const StepRecord> steps, const StepRecord& save) {
  uint32_t life = 0;
  for (const StepRecord& step : steps) life = std::max(life, step.life);
  const std::string kind = KindOf(save);
  std::vector<const StepRecord*> alike;
  for (const StepRecord& step : steps) {
    if (step.life == life && !step.converted && KindOf(step) == kind) alike.push_back(&step);
  }
  return alike;
}

// REQUIRES: there is one.
const StepRecord* Greatest(const std::vector<const StepRecord*>& steps,
                           bool (*less)(const StepRecord&, const StepRecord&)) {
  return *std::max_element(steps.begin(), steps.end(),
                           [&](const StepRecord* a, const StepRecord* b) { return less(*a, *b); });
}

// REQUIRES: all are of one life.
std::optional<LifeChoice::Doubt> DoubtOf(std::vector<const StepRecord*> alike, StepRecord save) {
  save.life = alike.front()->life;
  alike.push_back(&save);
  const StepRecord* const later = Greatest(alike, IsEarlier);
  const StepRecord* const greater = Greatest(alike, IsOlder);
  if (later->mtime_ns == greater->mtime_ns || later->iteration == greater->iteration)
    return std::nullopt;
  if (later != &save && greater != &save) return std::nullopt;  // told of those
  const auto record = [&](const StepRecord* step) {
    return step == &save ? std::nullopt : std::optional(*step);
  };
  return LifeChoice::Doubt{record(later), record(greater)};
}

bool WasSavedAgain(std::span<const StepRecord> steps, const StepRecord& save, uint32_t life,
                   const std::function<SourceNow(const StepRecord&)>& look) {
  return std::any_of(steps.begin(), steps.end(), [&](const StepRecord& step) {
    return step.life == life && step.source == save.source && step.iteration >= save.iteration &&
           step.mtime_ns < save.mtime_ns && look(step) == SourceNow::kRewritten;
  });
}

bool IsNamed(const NewSave& save, const StepRecord& newest) {
  return save.named && save.named->iteration < newest.iteration &&
         save.named->mtime_ns > newest.mtime_ns && save.record.iteration <= save.named->iteration &&
         save.record.mtime_ns <= save.named->mtime_ns;
}

// The step whose bytes the save has, at the same path; null if there is none.
const StepRecord* SameStep(std::span<const StepRecord> steps, const StepRecord& save,
                           const std::function<SourceNow(const StepRecord&)>& look) {
  const auto same = std::find_if(steps.begin(), steps.end(), [&](const StepRecord& step) {
    return step.source == save.source && step.iteration == save.iteration &&
           look(step) == SourceNow::kSame;
  });
  return same == steps.end() ? nullptr : &*same;
}

LifeEvidence EvidenceOf(std::span<const StepRecord> steps, const NewSave& save,
                        const StepRecord& newest,
                        const std::function<SourceNow(const StepRecord&)>& look) {
  if (WasSavedAgain(steps, save.record, newest.life, look)) return LifeEvidence::kSavedAgain;
  if (look(newest) == SourceNow::kGone) return LifeEvidence::kGone;
  if (IsNamed(save, newest)) return LifeEvidence::kNamed;
  if (save.version > 0) return LifeEvidence::kVersion;
  return save.arrived ? LifeEvidence::kArrived : LifeEvidence::kNone;
}

std::string_view WhyOf(LifeEvidence evidence) {
  switch (evidence) {
    case LifeEvidence::kSavedAgain:
      return "the same path was saved again, later than the earlier "
             "step";
    case LifeEvidence::kGone:
      return "the earlier step is gone from its place, and the new step "
             "is later";
    case LifeEvidence::kNamed: return "the job's own pointer names a later save";
    case LifeEvidence::kVersion:
      return "its name says that another save had it before, and the new step is later";
    case LifeEvidence::kArrived: return "the new step was saved while the directory was followed";
    case LifeEvidence::kNone: break;
  }
  return "";
}

}  // namespace

bool IsOlder(const StepRecord& a, const StepRecord& b) {
  const auto order = [](const StepRecord& record) {
    const bool timed = IsSnapshot(record);
    const bool own = !record.id.starts_with("last");  // Lightning's, which every save writes anew
    return std::tuple(timed ? 0 : record.life, timed ? 0 : record.iteration, !record.converted, own,
                      TimeOf(record));
  };
  return order(a) < order(b);
}

std::vector<Life> SplitIntoLives(std::vector<StepRecord> steps) {
  std::sort(steps.begin(), steps.end(), IsOlder);
  std::vector<Life> lives;
  for (StepRecord& step : steps) {
    const StepRecord* const before = lives.empty() ? nullptr : &lives.back().back();
    const bool begins = before == nullptr || before->life != step.life ||
                        (IsSnapshot(step) && step.iteration < before->iteration);
    if (begins) lives.emplace_back();
    lives.back().push_back(std::move(step));
  }
  return lives;
}

std::vector<StepRecord> NewestOf(std::vector<StepRecord> steps, uint64_t count) {
  const size_t kept = static_cast<size_t>(std::min<uint64_t>(steps.size(), count));
  std::set<std::string> newest;
  for (const auto& older : {IsOlder, IsEarlier}) {
    std::sort(steps.begin(), steps.end(), older);
    for (size_t i = steps.size() - kept; i < steps.size(); ++i) newest.insert(steps[i].id);
  }
  std::erase_if(steps, [&](const StepRecord& step) { return !newest.contains(step.id); });
  return steps;
}

std::vector<size_t> OrderOfSaves(std::span<const FoundSave> saves) {
  std::vector<size_t> order(saves.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const auto key = [&](size_t i) {
      return std::tuple(saves[i].iteration, !saves[i].converted, saves[i].mtime_ns);
    };
    return key(a) < key(b);
  });
  std::vector<size_t> latest_first = order;
  std::ranges::stable_sort(latest_first, std::greater(),
                           [&](size_t i) { return saves[i].mtime_ns; });
  std::set<size_t> moved;
  for (const size_t at : latest_first) {
    const FoundSave& named = saves[at];
    if ((!named.named && named.version == 0) || named.converted || moved.contains(at)) continue;
    std::optional<int64_t> before;  // the latest time of those that the job went back from
    for (const FoundSave& other : saves) {
      if (other.save != named.save || other.converted || other.iteration <= named.iteration)
        continue;
      if (other.version > 0 && other.version >= named.version) continue;
      before = std::max(other.mtime_ns, before.value_or(other.mtime_ns));
    }
    if (!before || named.mtime_ns <= *before) continue;
    std::stable_partition(order.begin(), order.end(), [&](size_t i) {
      const FoundSave& one = saves[i];
      const bool later = one.save == named.save && !one.converted && one.mtime_ns > *before &&
                         one.iteration <= named.iteration;
      if (later) moved.insert(i);
      return !later;
    });
  }
  return order;
}

LifeChoice LifeOf(std::span<const StepRecord> steps, const NewSave& save,
                  const std::function<SourceNow(const StepRecord&)>& look) {
  LifeChoice choice;
  choice.life = LifeAtTime(steps, save.record);
  const auto alike = AlikeOf(steps, save.record);
  if (alike.empty() || save.record.converted || IsSnapshot(save.record)) return choice;
  const StepRecord& newest = *Greatest(alike, IsOlder);
  const int64_t begun = save.oldest_ns == 0 ? save.record.mtime_ns : save.oldest_ns;
  const bool back = save.record.iteration < newest.iteration && begun > newest.mtime_ns;
  if (back) {
    if (const StepRecord* const same = SameStep(steps, save.record, look)) {
      choice.life = same->life;
      return choice;
    }
    choice.begins = EvidenceOf(steps, save, newest, look);
  }
  const bool last = newest.life == std::numeric_limits<uint32_t>::max();
  if (choice.begins != LifeEvidence::kNone && !last) {
    choice.life = newest.life + 1;
    choice.after = newest;
  } else if (choice.life == newest.life) {
    choice.doubt = DoubtOf(alike, save.record);
  }
  return choice;
}

std::string DescribeChoice(const StepRecord& published, const LifeChoice& choice) {
  const auto name = [&](const std::optional<StepRecord>& step) {
    const StepRecord& record = step ? *step : published;
    return StrCat(record.run, "/", record.id);
  };
  if (choice.after) {
    return StrCat(name({}), " begins another life of the run (number ", published.life + 1,
                  "): the training began again, or went back, after ", name(choice.after), "; ",
                  WhyOf(choice.begins), "; `latest` now means a step of the newest life");
  }
  if (!choice.doubt) return "";
  return StrCat(name(choice.doubt->later), " has a later time than ", name(choice.doubt->greater),
                ", which has the greater iteration and stays `latest`: nothing proves that the "
                "training began again; if it did, run `ckptfs "
                "remove ",
                name(choice.doubt->greater), "`");
}

}  // namespace ckptfs
