# SPDX-License-Identifier: Apache-2.0
#
# ckptfs_portable(TARGET [STATIC PREFIX]): a program, or a module of Python's, that needs
# nothing of a machine but a glibc >= 2.28 (docs/use/building.md).  It is a matter of
# linking alone: objects are those of any other program of the tree.
# STATIC: libraries are linked statically, those of PREFIX before others (static_libraries).
set(CKPTFS_GLIBC 2.28 CACHE INTERNAL "the oldest glibc of a portable program")
set(CKPTFS_PACKAGE_DIR ${CMAKE_CURRENT_LIST_DIR} CACHE INTERNAL "")
find_program(CKPTFS_ANY_PYTHON NAMES python3)

function(ckptfs_portable target)
  cmake_parse_arguments(ARG "" "STATIC" "" ${ARGN})
  set(glibc ${CMAKE_BINARY_DIR}/glibc-${CKPTFS_GLIBC})
  if(NOT TARGET ckptfs_glibc)
    set(made ${CKPTFS_PACKAGE_DIR}/older_glibc.py)
    add_custom_command(OUTPUT ${glibc}/libc.so DEPENDS ${made} VERBATIM
      COMMAND ${CKPTFS_ANY_PYTHON} ${made} ${CKPTFS_GLIBC} ${glibc})
    add_custom_target(ckptfs_glibc DEPENDS ${glibc}/libc.so)
  endif()
  add_dependencies(${target} ckptfs_glibc)
  set(sources ${CKPTFS_PACKAGE_DIR}/older_glibc.cc)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    list(APPEND sources ${CKPTFS_PACKAGE_DIR}/older_start.cc)
    target_link_options(${target} PRIVATE LINKER:--wrap=__libc_start_main)
  endif()
  target_sources(${target} PRIVATE ${sources})
  set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON
    COMPILE_OPTIONS -fvisibility=hidden)
  target_link_options(${target} PRIVATE -L${glibc} -static-libstdc++ -static-libgcc LINKER:--exclude-libs,ALL)
  target_link_libraries(${target} PRIVATE -lpthread -ldl -lrt)
  if(ARG_STATIC)
    set_target_properties(${target} PROPERTIES
      RULE_LAUNCH_LINK "${CKPTFS_ANY_PYTHON} ${CKPTFS_PACKAGE_DIR}/static_link.py ${ARG_STATIC}")
  endif()
endfunction()
