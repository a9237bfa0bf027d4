module shapes
  implicit none
  type, abstract :: shape
  contains
    procedure(area_of), deferred :: area
  end type
  abstract interface
    function area_of(this) result(a)
      import shape
      class(shape), intent(in) :: this
      real :: a
    end function
  end interface
  type, extends(shape) :: circle
    real :: r
  contains
    procedure :: area => circle_area
  end type
contains
  function circle_area(this) result(a)
    class(circle), intent(in) :: this
    real :: a
    a = 3.14 * this%r ** 2
  end function
  recursive function fib(n) result(f)
    integer, intent(in) :: n
    integer :: f
    if (n < 2) then
      f = n
    else
      f = fib(n-1) + fib(n-2)
    end if
  end function
  subroutine solve(a, b, n)
    integer, intent(in) :: n
    real, intent(inout) :: a(n,n), b(n)
    integer :: i, j
    do i = 1, n
      do j = i + 1, n
        b(j) = b(j) - a(j,i) / a(i,i) * b(i)
        a(j,:) = a(j,:) - a(j,i) / a(i,i) * a(i,:)
      end do
    end do
  end subroutine
end module
program main
  use shapes
  class(shape), allocatable :: s
  real :: a(8,8), b(8)
  integer :: k
  allocate(s, source=circle(2.0))
  call random_number(a)
  call random_number(b)
  call solve(a, b, 8)
  read *, k
  select case (k)
  case (1)
    print *, s%area()
  case (2)
    print *, fib(20)
  case (3:5)
    print *, b
  case default
    write (*, '(A,I5)') 'none', k
  end select
end program
