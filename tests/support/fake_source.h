// SPDX-License-Identifier: Apache-2.0
//
// FakeSource is the fake of the Source seam: a format of its own that can fail
// at the n-th call and be late.  Every subdirectory `stepN` is a step; it is
// complete once it has a file `done`, whose lines are its tensors:
//
//   NAME ELEMENTS FILE OFFSET        fp32, in bytes of FILE from OFFSET on
//
// A file `note` is a note of the step; a file `left_out` says why its optimizer is left out.
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/base/strings.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "core/state/tool_names.h"

namespace ckptfs {

// Names as tools give them.
inline const ToolNames& FakeNames() {
  static constexpr std::array<std::string_view, 3> kSaved = {".pt", ".pkl", ".safetensors"};
  static constexpr std::array<std::string_view, 2> kStarts = {".", "tmp-"};
  static constexpr std::array<std::string_view, 1> kEnds = {".tmp"};
  static constexpr std::array<std::string_view, 1> kFolders = {"checkpoints"};
  static constexpr ToolNames kNames = {kSaved, kStarts, kEnds, kFolders};
  return kNames;
}

class FakeSource final : public Source {
 public:
  // Another source of this kind, whose steps are named so.
  explicit FakeSource(std::string prefix = "step") : prefix_(std::move(prefix)) {}

  // The n-th call from now on (1 is the next) fails.
  void FailAt(uint64_t n, ErrorCode code = ErrorCode::kIo) {
    fail_code_ = code;
    fail_at_ = calls_ + n;
  }
  // Every call takes at least this long.
  void SetDelay(std::chrono::milliseconds delay) { delay_ = delay; }

  std::string_view name() const override { return "fake"; }

  Result<std::vector<StepCandidate>> Find(const std::shared_ptr<const Root>& root,
                                          const std::string& directory) const override {
    CKPT_RETURN_IF_ERROR(Enter(root->PathOf(directory)));
    std::vector<StepCandidate> out;
    if (IsStep(directory)) {
      CKPT_ASSIGN_OR_RETURN(out.emplace_back(), Candidate(root, directory));
      return out;
    }
    CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root->List(directory));
    for (const RootEntry& entry : entries) {
      const std::string path = JoinPath(directory, entry.name);
      if (!IsStep(path)) continue;
      CKPT_ASSIGN_OR_RETURN(out.emplace_back(), Candidate(root, path));
    }
    return out;
  }

  // As the step's files `sealed` and `unsealed` say; with `newest` nothing of it may be newer.
  SaveState StateOf(const StepCandidate& step, const SourceOptions&,
                    const SaveHistory& history) const override {
    before_ = history.before;
    if (Status entered = Enter(step.Path()); !entered)
      return SaveState::Begun(std::move(entered).error());
    std::map<std::string_view, std::optional<EntryStat>> there;
    for (const char* name : {"done", "sealed", "unsealed", "newest"}) {
      auto found = StatIfThere(*step.root, JoinPath(step.directory, name));
      if (!found) return SaveState::Begun(std::move(found).error());
      there[name] = *std::move(found);
    }
    const auto has = [&](std::string_view name) { return there[name].has_value(); };
    if (!has("done")) {
      return SaveState::Begun(Error{ErrorCode::kInvalid, StrCat(step.Path(), ": no file done")});
    }
    SaveState out;
    const bool is_newest = has("newest") && there["newest"]->stamp.mtime_ns >= step.mtime_ns;
    const bool grows = std::ranges::any_of(std::array{"sealed", "newest"}, [&](const char* last) {
      return history.growing.contains(JoinPath(step.directory, last));
    });
    if (has("sealed")) out.last = JoinPath(step.directory, "sealed");
    if (has("unsealed")) out.phase = SavePhase::kAllButLast;
    if (has("sealed") || is_newest) out.phase = SavePhase::kSealed;
    if (grows) out.phase = SavePhase::kProvisional;
    return out;
  }

  Result<StepModel> Read(const StepCandidate& step, const SourceOptions&) const override {
    CKPT_RETURN_IF_ERROR(Enter(step.Path()));
    CKPT_ASSIGN_OR_RETURN(const std::string text,
                          ReadWhole(*step.root, JoinPath(step.directory, "done"), 1 << 20));
    Assembler assembler;
    const uint32_t root = assembler.AddRoot(RootBelow(step.root, step.save));
    assembler.header().framework = "fake";
    assembler.header().id = step.id;
    assembler.header().iteration = step.iteration;
    const std::string note = JoinPath(step.directory, "note");
    CKPT_ASSIGN_OR_RETURN(const bool noted, HasFile(*step.root, note));
    if (noted) {
      CKPT_ASSIGN_OR_RETURN(assembler.header().notes.emplace_back(),
                            ReadWhole(*step.root, note, 1 << 10));
    }
    const std::string left_out = JoinPath(step.directory, "left_out");
    CKPT_ASSIGN_OR_RETURN(const bool partial, HasFile(*step.root, left_out));
    if (partial) {
      CKPT_ASSIGN_OR_RETURN(const std::string why, ReadWhole(*step.root, left_out, 1 << 10));
      LeaveOut(assembler.header(), {LeftOutPart::kOptimizer, "the optimizer", why, "give more"});
    }
    const std::string prefix = step.Prefix();
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      CKPT_RETURN_IF_ERROR(AddTensor(assembler, root, prefix, line));
    }
    return std::move(assembler).Finish();
  }

  // Returns what StateOf was last told of the step before.
  std::set<std::string> before() const { return before_ ? *before_ : std::set<std::string>(); }

 private:
  mutable std::shared_ptr<const std::set<std::string>> before_;
  bool IsStep(const std::string& path) const {
    const std::string name = path.substr(path.rfind('/') + 1);
    const size_t digits = prefix_.size();
    return name.starts_with(prefix_) && name.size() > digits &&
           name.find_first_not_of("0123456789", digits) == std::string::npos;
  }

  Result<StepCandidate> Candidate(const std::shared_ptr<const Root>& root,
                                  const std::string& directory) const {
    StepCandidate out;
    out.root = root;
    out.directory = directory;
    out.save = ParentPath(directory);
    out.id = directory.substr(directory.rfind('/') + 1);
    out.iteration = std::stoull(out.id.substr(prefix_.size()));
    CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root->List(directory));
    for (const RootEntry& entry : entries) {
      CKPT_ASSIGN_OR_RETURN(const EntryStat found, root->Stat(JoinPath(directory, entry.name)));
      out.mtime_ns = std::max(out.mtime_ns, found.stamp.mtime_ns);
    }
    CKPT_ASSIGN_OR_RETURN(out.latest, HasFile(*root, JoinPath(directory, "latest")));
    CKPT_ASSIGN_OR_RETURN(out.converted, HasFile(*root, JoinPath(directory, "converted")));
    return out;
  }

  static Status AddTensor(Assembler& assembler, uint32_t root, const std::string& prefix,
                          const std::string& line) {
    std::istringstream words(line);
    std::string name, file;
    uint64_t elements = 0, offset = 0;
    if (!(words >> name >> elements >> file >> offset)) {
      return Fail(ErrorCode::kInvalid, StrCat("broken line '", line, "'"));
    }
    CKPT_ASSIGN_OR_RETURN(const BlobIndex blob, assembler.AddFile(root, prefix + file));
    if (offset + elements * 4 > assembler.blob(blob).stamp.size) {
      return Fail(ErrorCode::kInvalid, StrCat(file, ": too small for ", name));
    }
    Parameter parameter;
    parameter.name = name;
    parameter.shape = {elements};
    parameter.pattern = Pattern::Replicate();
    CKPT_ASSIGN_OR_RETURN(const ParameterIndex index, assembler.AddParameter(parameter));
    CKPT_ASSIGN_OR_RETURN(const AtomIndex atom,
                          assembler.AddAtom(index, "", "weight", DType::kF32, {elements}));
    const uint32_t local = assembler.AddLocal(atom, 0, WholeTensor({elements}));
    assembler.AddFragment(atom, 0, local, Fragment{0, elements, blob, offset, DType::kF32});
    return {};
  }

  // Counts the call, waits, fails if it is its turn.
  Status Enter(const std::string& path) const {
    const uint64_t call = ++calls_;
    const std::chrono::milliseconds delay = delay_;
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    if (call == fail_at_) return Fail(fail_code_, StrCat(path, ": injected failure"));
    return {};
  }

  const std::string prefix_;
  mutable std::atomic<uint64_t> calls_{0};
  std::atomic<uint64_t> fail_at_{0};
  std::atomic<ErrorCode> fail_code_{ErrorCode::kIo};
  std::atomic<std::chrono::milliseconds> delay_{std::chrono::milliseconds(0)};
};

}  // namespace ckptfs
