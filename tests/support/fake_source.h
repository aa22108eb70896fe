// SPDX-License-Identifier: Apache-2.0
//
// FakeSource is the fake of the Source seam: a format of its own that can fail
// at the n-th call and be late.  Every subdirectory `stepN` is a step; it is
// complete once it has a file `done`, whose lines are its tensors:
//
//   NAME ELEMENTS FILE OFFSET        fp32, in bytes of FILE from OFFSET on
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core/base/strings.h"
#include "core/ingest/assembler.h"
#include "core/ingest/source.h"

namespace ckptfs {

class FakeSource final : public Source {
 public:
  // The n-th call from now on (1 is the next) fails.
  void FailAt(uint64_t n, ErrorCode code = ErrorCode::kIo) {
    fail_code_ = code;
    fail_at_ = calls_ + n;
  }
  // Every call takes at least this long.
  void SetDelay(std::chrono::milliseconds delay) { delay_ = delay; }

  std::string_view name() const override { return "fake"; }

  Result<std::vector<StepCandidate>> Find(const std::string& path) const override {
    CKPT_RETURN_IF_ERROR(Enter(path));
    if (IsStep(path)) return std::vector<StepCandidate>{Candidate(path, path)};
    std::vector<StepCandidate> out;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
      if (IsStep(entry.path())) out.push_back(Candidate(entry.path().string(), path));
    }
    if (error) return Fail(ErrnoError(error.value(), path));
    return out;
  }

  Status Complete(const StepCandidate& step, const SourceOptions&) const override {
    CKPT_RETURN_IF_ERROR(Enter(step.directory));
    struct stat info {};
    if (::stat(StrCat(step.directory, "/done").c_str(), &info) == 0) return {};
    return Fail(ErrorCode::kInvalid, StrCat(step.directory, ": no file done: ", errno));
  }

  Result<StepModel> Read(const StepCandidate& step, const SourceOptions&) const override {
    CKPT_RETURN_IF_ERROR(Enter(step.directory));
    CKPT_ASSIGN_OR_RETURN(const std::string text, ReadText(StrCat(step.directory, "/done")));
    Assembler assembler;
    const uint32_t root = assembler.AddRoot(step.root);
    assembler.header().framework = "fake";
    assembler.header().id = step.id;
    assembler.header().iteration = step.iteration;
    const std::string prefix = step.root == step.directory ? "" : StrCat(step.id, "/");
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      CKPT_RETURN_IF_ERROR(AddTensor(assembler, root, prefix, line));
    }
    return std::move(assembler).Finish();
  }

 private:
  static bool IsStep(const std::filesystem::path& path) {
    const std::string name = path.filename().string();
    return name.starts_with("step") && name.size() > 4 &&
           name.find_first_not_of("0123456789", 4) == std::string::npos;
  }

  static StepCandidate Candidate(const std::string& directory, const std::string& root) {
    StepCandidate out;
    out.directory = directory;
    out.root = root;
    out.id = std::filesystem::path(directory).filename().string();
    out.iteration = std::stoull(out.id.substr(4));
    std::error_code ignored;
    out.latest = std::filesystem::exists(directory + "/latest", ignored);
    return out;
  }

  static Result<std::string> ReadText(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return Fail(ErrnoError(errno, path));
    std::string text(4096, '\0');
    const ssize_t length = ::pread(fd, text.data(), text.size(), 0);
    const int error = errno;
    ::close(fd);
    if (length < 0) return Fail(ErrnoError(error, path));
    text.resize(static_cast<size_t>(length));
    return text;
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

  mutable std::atomic<uint64_t> calls_{0};
  std::atomic<uint64_t> fail_at_{0};
  std::atomic<ErrorCode> fail_code_{ErrorCode::kIo};
  std::atomic<std::chrono::milliseconds> delay_{std::chrono::milliseconds(0)};
};

}  // namespace ckptfs
